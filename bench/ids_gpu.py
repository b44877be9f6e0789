"""Token ids, MLA and transformers' models on a GPU: right, then how fast, beside torch.

python bench/ids_gpu.py            # everything, about a minute
python bench/ids_gpu.py ids mla    # some of: ids mla transformers step tests
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor
from triton.testing import do_bench

from slipstream import layers, ops
from slipstream.runtime.token_ids import raise_pending, synchronize

ROWS: list[dict[str, object]] = []


def ms(run: Callable) -> float:
    return round(float(do_bench(run, return_mode="median")), 4)  # pyright: ignore[reportArgumentType]


def host_us(run: Callable, count: int = 200) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return round(1e6 * spent / count, 1)


def row(case: str, ours: Callable | None, peer: Callable | None, error: object = "") -> None:
    ROWS.append(
        {
            "case": case,
            "ms": ms(ours) if ours else "",
            "peer_ms": ms(peer) if peer else "",
            "host_us": host_us(ours) if ours else "",
            "peer_host_us": host_us(peer) if peer else "",
            "error": f"{error:.1e}" if isinstance(error, float) else error,
        }
    )
    print("  ".join(f"{x:<9}" for x in list(ROWS[-1].values())[1:]), case, flush=True)


def off(got: Tensor, want: Tensor) -> float:
    """Root mean square, relative."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).norm() / want.norm())


def ids() -> None:
    start = time.perf_counter()
    ops.embedding(torch.zeros(3, dtype=torch.int64, device="cuda"), torch.ones(5, 64).cuda())
    synchronize()
    print(f"first embedding: {time.perf_counter() - start:.2f} s")
    for N, V, D in [(16384, 128256, 4096), (8, 128256, 4096), (65536, 32000, 1024)]:
        weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16)
        token = torch.randint(0, V, (N,), device="cuda")
        same = torch.equal(ops.embedding(token, weight), F.embedding(token, weight))
        row(
            f"embedding {N} x {D}",
            lambda t=token, w=weight: ops.embedding(t, w),
            lambda t=token, w=weight: F.embedding(t, w),
            "same" if same else "DIFFERENT",
        )
    logits = torch.randn(4096, 32000, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 32000, (4096,), device="cuda")
    row(
        "cross_entropy 4096 x 32000",
        lambda: ops.cross_entropy(logits, target),
        lambda: F.cross_entropy(logits, target),
    )
    count = 100_000
    start = time.perf_counter()
    for _ in range(count):
        raise_pending()
    print(f"poll: {1e9 * (time.perf_counter() - start) / count:.0f} ns")
    token[77] = 96000
    ops.embedding(token[None], torch.ones(32000, 64, device="cuda"))
    for _ in range(2):
        try:
            synchronize()
            print("nothing pending")
        except ValueError as error:
            print("raised:", error)


def mla() -> None:
    small = layers.MLA(96, 3, 40, 48, 24, 16, 20)
    x = torch.randn(2, 77, 96)
    want = small.double()(x.double())[0]
    for dtype in (torch.float32, torch.bfloat16):
        layer = small.to("cuda", dtype)
        with torch.no_grad():
            y, state = layer(x[:, :60].to("cuda", dtype), use_cache=True)
            parts = [y]
            for t in range(60, 77):
                y, state = layer(x[:, t : t + 1].to("cuda", dtype), state=state, use_cache=True)
                parts.append(y)
        name = str(dtype).removeprefix("torch.")
        row(f"mla {name} prefill", None, None, off(layer(x.to("cuda", dtype))[0], want))
        row(f"mla {name} decode", None, None, off(torch.cat(parts, 1), want))
    big = layers.MLA(2048, 16, None).to("cuda", torch.bfloat16)
    x = torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16)
    q, k, v = (
        torch.randn(1, 8192, 16, n, device="cuda", dtype=torch.bfloat16) for n in (192, 192, 128)
    )
    with torch.no_grad():
        row(
            "attention 8192 192/128 H16 beside SDPA",
            lambda: ops.attention(q, k, v),
            lambda: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            ),
        )
        row("mla prefill 8192 H16", lambda: big(x), None)
        _, state = big(x.expand(8, -1, -1), use_cache=True)
        one = x[:, :1].expand(8, -1, -1)
        big.mode = "fused_recurrent"
        absorbed = lambda: big(one, state=state)  # noqa: E731
        row("mla decode B8 S8192 absorbed", absorbed, None)


def models(**options: Any) -> Any:
    """Pairs of a model with "eager" and with ours."""
    import copy

    import transformers

    import slipstream.integrations.transformers  # noqa: F401

    for prefix, given in {
        "Llama": {},
        "Gemma2": {"sliding_window": 20, "attn_logit_softcapping": 3.0},
        "Mistral": {"sliding_window": 20},
        "GptOss": {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1},
    }.items():
        sizes = {
            "vocab_size": 61, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "pad_token_id": 0, "attention_dropout": 0.0,
        }  # fmt: skip
        config = getattr(transformers, f"{prefix}Config")(
            **(sizes | given | options), attn_implementation="eager"
        )
        eager = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().cuda()
        slip = copy.deepcopy(eager)
        slip.set_attn_implementation("slipstream")
        yield prefix, eager, slip


def transformers() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for prefix, eager, slip in models():
        ids = torch.randint(1, 61, (3, 133), device="cuda")
        mask = torch.ones_like(ids)
        mask[1, :50] = 0
        at = (torch.arange(133, device="cuda") % 37)[None].expand(3, -1)
        for case, inputs in {
            "plain": {},
            "padded": {"attention_mask": mask},
            "packed": {"position_ids": at, "use_cache": False},
        }.items():
            found = []
            for model in (eager, slip):
                y = model(input_ids=ids, **inputs).logits
                y = y[mask.bool()] if case == "padded" else y
                grads = torch.autograd.grad(y.sin().sum(), list(model.parameters()))
                found.append(torch.cat([x.flatten() for x in (y, *grads)]))
            row(f"{prefix} {case}", None, None, off(found[1], found[0]))
        for cache in ("dynamic", "static"):
            kwargs: Any = {} if cache == "dynamic" else {"cache_implementation": "static"}
            kwargs |= {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
            kwargs |= {"output_logits": True, "return_dict_in_generate": True}
            kwargs |= {"disable_compile": True, "attention_mask": mask}
            runs = [model.generate(ids, **kwargs) for model in (eager, slip)]
            first = [run.logits[0] for run in runs]
            same = float((runs[0].sequences == runs[1].sequences).float().mean())
            row(f"{prefix} {cache}, {same:.2f} of tokens", None, None, off(first[1], first[0]))


def step() -> None:
    """Training steps and decoding of four layers of a Llama of 8B parameters."""
    import transformers

    config: Any = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to("cuda", torch.bfloat16)
    ids = torch.randint(1, 1000, (1, 8192), device="cuda")
    at = (torch.arange(8192, device="cuda") % 2048)[None]

    def train(name: str, **inputs: Any) -> Callable:
        def run() -> None:
            model.set_attn_implementation(name)
            model(ids, use_cache=False, **inputs).logits.float().sum().backward()

        return run

    for case, inputs in {"plain": {}, "packed": {"position_ids": at}}.items():
        row(
            f"Llama 4 layers 8192 {case}, beside sdpa",
            train("slipstream", **inputs),
            train("sdpa", **inputs),
        )


def tests() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        + ["tests/gpu/test_old_failures.py"],
        capture_output=True,
        text=True,
    )
    print("\n".join((ran.stdout + ran.stderr).splitlines()[-12:]))


PARTS = {"ids": ids, "mla": mla, "transformers": transformers, "step": step, "tests": tests}


def main() -> None:
    torch.manual_seed(0)
    print("ms, peer's, host us, peer's, error, case")
    for name in sys.argv[1:] or PARTS:
        try:
            PARTS[name]()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    if ROWS:
        print(record("ids_gpu", ROWS))


if __name__ == "__main__":
    main()

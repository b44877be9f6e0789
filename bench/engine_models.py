"""vLLM as a whole with its own layers and with slipstream's, each in a process of its own.

    pip install vllm==0.26.0               beside slipstream, in torch 2.11
    python bench/engine_models.py          two engines on one GPU, which take turns

Qwen3-Next at the released widths with random weights: 8 layers, of which the last has experts, 16
that are all chosen, and a vocabulary of 16,384; states in float32, decoding by CUDA graphs. decode
and prefill: tokens/s of the engine, the median of 5, most of which is the host's time at this size.
forced: 64 prompts and 157 tokens of each that vLLM's own layers have chosen, to both: root mean
square errors of the logits against float64, of the worst step; changed: of how many steps the
largest logit is another one than vLLM's, and in brackets of how many where float64's two largest
logits are further apart than vLLM's largest error of that step. compilations: of Triton, by ours,
after the engine has started, of kernels that vLLM's own layers do not ask for.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, Report, parser
from processes import Child, tell
from torch import Tensor
from triton import knobs

VOCAB, LAYERS, PROMPT, NEW, ROWS = 16384, 8, 32, 157, 64
THETA, ROTARY = 1e7, 0.25
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16",
    "vocab_size": VOCAB, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": ROTARY
    },
    "rope_theta": THETA, "partial_rotary_factor": ROTARY, "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "decoder_sparse_step": 1,
    "num_experts": 16, "num_experts_per_tok": 16, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    "mlp_only_layers": list(range(LAYERS - 1)),
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# name, sequences, tokens of a prompt, tokens of an answer
CASES = [(f"decode batch {n}", n, PROMPT, 128) for n in (1, 8, ROWS)]
CASES += [("prefill 1x4096", 1, 4096, 1), ("prefill 8x1024", 8, 1024, 1)]


def seed(model: Any) -> None:
    """The same weights in each process."""
    for name, p in model.named_parameters():
        if p.is_floating_point():
            generator = torch.Generator(p.device).manual_seed(sum(map(ord, name)))
            x = torch.randn(p.shape, generator=generator, device=p.device)
            if name.endswith("linear_attn.norm.weight"):
                x = 1 + 0.1 * x
            elif "norm" in name:
                x *= 0.1
            elif name.endswith("dt_bias"):
                x = x.sigmoid() - 2
            elif not (name.endswith("A_log") or p.dim() < 2 or "embed" in name):
                x *= p.shape[-1] ** -0.5
            p.data.copy_(x)


def wide(x: Tensor) -> Tensor:
    return x.detach().double()


def norm(x: Tensor, of: Any) -> Tensor:
    y = x * (x.pow(2).mean(-1, keepdim=True) + of.variance_epsilon).rsqrt()
    return y * (1 + wide(of.weight))


def gated(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    a, b = (h @ wide(up).mT).chunk(2, -1)
    return (F.silu(a) * b) @ wide(down).mT


def delta_net(layer: Any, h: Tensor) -> Tensor:
    """vLLM's layer in float64, token by token."""
    N, T, K, HV = *h.shape[:2], layer.head_k_dim, layer.num_v_heads
    flat, size = h.flatten(0, 1), [layer.key_dim, layer.key_dim, layer.value_dim]
    projected = (flat @ wide(x.weight).mT for x in (layer.in_proj_qkvz, layer.in_proj_ba))
    *parts, z, b, a = layer.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([x.flatten(1) for x in parts], -1).unflatten(0, (N, T))
    weight = wide(layer.conv1d.weight)[:, 0]
    mixed = F.pad(mixed, (0, 0, weight.shape[1] - 1, 0))
    mixed = F.silu(sum((mixed[:, i : i + T] * w for i, w in enumerate(weight.mT)), h.new_zeros(())))
    q, k, v = (x.unflatten(-1, (-1, K)) for x in mixed.split(size, -1))
    q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q * K**-0.5, k))
    g = -wide(layer.A_log).exp() * F.softplus(a + wide(layer.dt_bias))
    decay, beta = (x.unflatten(0, (N, T)) for x in (g.exp(), b.sigmoid()))
    state, o = h.new_zeros(N, HV, K, v.shape[-1]), torch.empty_like(v)
    for t in range(T):
        state = state * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, ..., None] * state).sum(-2))
        state = state + k[:, t, ..., None] * u[..., None, :]
        o[:, t] = (q[:, t, ..., None] * state).sum(-2)
    o = o * (o.pow(2).mean(-1, keepdim=True) + layer.norm.eps).rsqrt() * wide(layer.norm.weight)
    return (o * F.silu(z.unflatten(0, (N, T)))).flatten(-2) @ wide(layer.out_proj.weight).mT


def attention(layer: Any, h: Tensor) -> Tensor:
    T, D = h.shape[1], layer.head_dim
    sizes = [2 * layer.q_size, layer.kv_size, layer.kv_size]
    both, k, v = (h @ wide(layer.qkv_proj.weight).mT).split(sizes, -1)
    q, gate = both.unflatten(-1, (layer.num_heads, -1)).chunk(2, -1)
    k, v = (x.unflatten(-1, (-1, D)) for x in (k, v))
    turned = int(D * ROTARY)
    speed = THETA ** -(torch.arange(0, turned, 2, device=h.device).double() / turned)
    angle = (torch.arange(T, device=h.device)[:, None] * speed)[:, None]

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., :turned].chunk(2, -1)
        c, s = angle.cos(), angle.sin()
        return torch.cat([a * c - b * s, b * c + a * s, x[..., turned:]], -1)

    q, k = rotated(norm(q, layer.q_norm)), rotated(norm(k, layer.k_norm))
    k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 2) for x in (k, v))
    scores = torch.einsum("nthd,nshd->nhts", q, k) * D**-0.5
    later = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    o = torch.einsum("nhts,nshd->nthd", weights, v) * gate.sigmoid()
    return o.flatten(-2) @ wide(layer.o_proj.weight).mT


def mlp(layer: Any, h: Tensor) -> Tensor:
    """With experts: all of them, by their softmax."""
    if not hasattr(layer, "experts"):
        return gated(h, layer.gate_up_proj.weight, layer.down_proj.weight)
    names, shared = dict(layer.named_parameters()), layer.shared_expert
    ups, downs = (
        next(p for n, p in names.items() if n.endswith(f"{x}_weight")) for x in ("w13", "w2")
    )
    shares = (h @ wide(layer.gate.weight).mT).softmax(-1).unbind(-1)
    y = sum(s[..., None] * gated(h, *w) for s, *w in zip(shares, ups, downs, strict=True))
    own = gated(h, shared.gate_up_proj.weight, shared.down_proj.weight)
    return y + (h @ wide(layer.shared_expert_gate.weight).mT).sigmoid() * own


@torch.no_grad()
def exact(model: Any, tokens: Tensor) -> Tensor:
    """Logits [N, T, VOCAB] of tokens [N, T] in float64, with the engine's parameters."""
    x = wide(model.model.embed_tokens.weight)[tokens]
    for layer in model.model.layers:
        h = norm(x, layer.input_layernorm)
        is_linear = hasattr(layer, "linear_attn")
        x = x + (delta_net(layer.linear_attn, h) if is_linear else attention(layer.self_attn, h))
        x = x + mlp(layer.mlp, norm(x, layer.post_attention_layernorm))
    return (norm(x, model.model.norm) @ wide(model.lm_head.weight).mT)[..., :VOCAB]


class Engine:
    """forced: tokens [N, T] that are answered whatever the logits, which are kept."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM
        from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

        self.compiled: list[str] = []
        self.forced: Tensor | None = None
        self.logits: list[Tensor] = []
        knobs.runtime.jit_cache_hook = self._compiling
        of_model: Callable[..., Tensor] = Qwen3NextForCausalLM.compute_logits
        Qwen3NextForCausalLM.compute_logits = lambda *given: self._chosen(of_model(*given))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, ROWS]}
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
            max_num_seqs=ROWS, max_num_batched_tokens=8192, gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=12 << 30, enable_prefix_caching=False, seed=0,
            gdn_prefill_backend="triton", attention_backend="TRITON_ATTN",
            mamba_ssm_cache_dtype="float32", compilation_config={"mode": 0, **graphs},
        )  # fmt: skip
        models: list[Any] = []
        self.llm.apply_model(models.append)
        (self.model,) = models
        seed(self.model)

    def _compiling(self, **given: Any) -> bool:
        function = given.get("fn")
        self.compiled.append(str(getattr(function, "name", function)))
        return False

    def _chosen(self, logits: Tensor) -> Tensor:
        step = len(self.logits)
        if self.forced is None or logits.shape[0] != len(self.forced) or step >= NEW:
            return logits
        self.logits.append(logits.clone())
        return torch.full_like(logits, -1e4).scatter_(1, self.forced[:, step, None], 0)

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": x} for x in prompts]
        return [
            list(x.outputs[0].token_ids) for x in self.llm.generate(given, params, use_tqdm=False)
        ]

    def force(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        """Logits [N, T, VOCAB] of the steps that choose the tokens."""
        self.forced, self.logits = tokens.cuda(), []
        assert self.run(prompts, NEW) == tokens.tolist(), "a row of the batch moved"
        self.forced = None
        return torch.stack(self.logits, 1)


def prompts_of(count: int, length: int, number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(2, VOCAB, (count, length), generator=generator).tolist()


def child(tag: str, folder: Path) -> None:
    """Answers the lines of its parent; theirs chooses the tokens that are forced."""
    own = folder / tag
    own.mkdir()
    engine, prompts = Engine(own), prompts_of(ROWS, PROMPT, 3)
    if tag == "ours":
        from slipstream.runtime import compile_ahead

        compile_ahead.finish()  # what is compiled in the background while the engine starts
    started = len(engine.compiled)
    for _, count, length, new in CASES:
        for number in range(2):
            engine.run(prompts_of(count, length, number), new)
    tell(ready=True, compiled=engine.compiled[started:])
    for line in sys.stdin:
        what, number = line.split()
        if what == "force":
            if tag == "theirs":
                torch.save(torch.tensor(engine.run(prompts, NEW)), folder / "tokens.pt")
            tokens = torch.load(folder / "tokens.pt")
            torch.save(engine.force(prompts, tokens).cpu(), own / "logits.pt")
            tell(forced=True)
        elif what == "compare":
            tokens = torch.load(folder / "tokens.pt")
            both = [torch.load(folder / x / "logits.pt").cuda() for x in ("ours", "theirs")]
            inputs = torch.cat([torch.tensor(prompts), tokens[:, :-1]], 1).cuda()
            rows = [exact(engine.model, x)[:, PROMPT - 1 :] for x in inputs.split(16)]
            tell(**compared(both[0], both[1], torch.cat(rows)))
        else:
            _, count, length, new = CASES[int(what)]
            given, times = prompts_of(count, length, 10 + int(number)), []
            for tokens in (1, new) if new > 1 else (1,):
                start = time.perf_counter()
                engine.run(given, tokens)
                times.append(time.perf_counter() - start)
            # of the tokens behind the first one, or of the prompts
            taken, many = (times[1] - times[0], new - 1) if new > 1 else (times[0], length)
            tell(rate=count * many / taken)


def compared(ours: Tensor, theirs: Tensor, want: Tensor) -> dict[str, Any]:
    differences = [x.double() - want for x in (ours, theirs)]
    rms = [x.pow(2).mean(-1).sqrt().flatten() for x in differences]
    largest = [x.abs().amax(-1).flatten() for x in differences]
    top = want.topk(2, -1).values
    margin, moved = (top[..., 0] - top[..., 1]).flatten(), ours.argmax(-1) != theirs.argmax(-1)
    moved = moved.flatten()
    above = int((moved & (margin > largest[1])).sum())
    return {
        "worst": [float(x.max()) for x in rms],
        "ratio": float((rms[0] / rms[1]).max()),
        "changed": f"{int(moved.sum())} ({above}) of {len(moved)}",
    }


def measure(report: Report) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        started = [
            Child(__file__, [x, folder], 0, SLIPSTREAM_VLLM=str(int(x == "ours")), **ENVIRONMENT)
            for x in ("theirs", "ours")
        ]
        try:
            ready = [x.next() for x in started]
            for x, told in zip(started, ready, strict=True):
                if told is None:
                    raise RuntimeError(f"{x.name}: {x.failure()}")
            theirs, ours = (Counter(x["compiled"]) for x in ready if x)
            common = {"engine": "vllm", "version": version("vllm"), "model": "Qwen3-Next, 8 layers"}
            more = {"changed": "", "compilations": sum((ours - theirs).values())}
            for n, (name, *_) in enumerate(CASES):
                rates = [[], []]
                for turn in range(5):
                    for found, x in zip(rates, started, strict=True):
                        x.say(f"{n} {turn}")
                        found.append((x.next() or {})["rate"])
                b, a = (sorted(x)[2] for x in rates)
                cells = {"case": f"engine {name}", "ours": f"{a:.1f}", "theirs": f"{b:.1f}"}
                yield {**common, **cells, "unit": "tokens/s", "ratio": f"{a / b:.2f}", **more}
            for x in started:
                x.say("force 0")
                x.next()
            started[0].say("compare 0")
            told = started[0].next() or {}
            a, b = told["worst"]
            cells = {"case": "engine, forced tokens", "ours": f"{a:.4f}", "theirs": f"{b:.4f}"}
            more["changed"] = told["changed"]
            yield {**common, **cells, "unit": "rms", "ratio": f"{told['ratio']:.2f}", **more}
        finally:
            for x in started:
                x.end()


def main(argv: Sequence[str] | None = None) -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--child", nargs=2, metavar=("ours|theirs", "FOLDER"), default=None)
    given = options.parse_args(argv)
    if given.child:
        child(given.child[0], Path(given.child[1]))
        return
    report = Report(given)
    if DEVICE.type == "cpu" or find_spec("vllm") is None:
        print("vllm is left out")
        return
    report.measure([("vllm", "engines", lambda: list(measure(report)))])


if __name__ == "__main__":
    main()

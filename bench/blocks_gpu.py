"""Norms, losses, short convolution, rotary and gated activations on a GPU: right, then how fast.

python bench/blocks_gpu.py            # everything, beside torch
python bench/blocks_gpu.py --check    # only the comparison with the float64 formulas
python bench/blocks_gpu.py --times    # only the times; --peer adds Liger and fla if they are there
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.ops.activation import swiglu
from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.ops.distill import linear_kl_div
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.ops.norm import group_norm, l2_norm, layer_norm, rms_norm, rms_norm_gated
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from tests.blocks import BLOCKS, Block, cast, leaves

BF16 = torch.bfloat16
# relative RMS error of outputs and gradients; a loss of 16-bit logits that are made on the way
# knows them to 1 / 256 only
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 0.007}
COARSE = {"linear_cross_entropy": 0.05, "linear_kl_div": 0.05}


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def big_cases() -> Iterator[Block]:
    """Shapes that the table of blocks does not reach: long rows, many rounds, many classes."""
    table = {block.name: block for block in BLOCKS}

    def like(name: str, inputs: Callable[[], dict], **options: Any) -> Block:
        block = table[name]
        return dataclasses.replace(
            block, inputs=lambda T, D: inputs(), options={**block.options, **options}
        )

    both, gated = ("weight", "bias"), ("gate", "weight")
    plan = {
        (5000, 128): ("rms_norm", "l2_norm", "group_norm"),
        (3001, 2048): ("rms_norm-residual", "layer_norm", "group_norm", "rms_norm_gated-silu"),
        (700, 3000): ("layer_norm", "rms_norm_gated-mamba2"),
        (300, 16384): ("rms_norm", "rms_norm-residual"),
        (40, 20000): ("rms_norm", "rms_norm_gated-silu"),
        (9, 65536): ("layer_norm", "rms_norm_gated-mamba2"),
    }
    extra = {"rms_norm-residual": (*both, "residual"), "l2_norm": ()}
    for (R, D), names in plan.items():
        for name in names:
            given = extra.get(name, gated if "gated" in name else both)

            def some(R: int = R, D: int = D, given: tuple = given) -> dict:
                rows = {n: rand(R, D) for n in ("x", "gate", "residual") if n in ("x", *given)}
                return {**rows, **{n: rand(D) for n in both if n in given}}

            groups = {
                "group_norm": {"num_groups": 4},
                "rms_norm_gated-mamba2": {"group_size": D // 4},
            }
            yield like(name, some, **groups.get(name, {}))
    for V in (1000, 32000, 50257, 151936):

        def logits(V: int = V) -> dict:
            target = torch.randint(0, V, (200,), device="cuda")
            target[::7] = -100
            return {"logits": 3 * rand(200, V), "target": target}

        def hidden(V: int = V) -> dict:
            given = {"hidden": rand(200, 64), "weight": 0.3 * rand(V, 64), "bias": rand(V)}
            return {**given, "target": logits(V)["target"]}

        for kind in ("plain", "mean", "none"):
            yield like(f"cross_entropy-{kind}", logits)
            yield like(f"linear_cross_entropy-{kind}", hidden)
    for D, W, packed in ((100, 4, False), (100, 4, True), (4096, 4, False), (512, 8, True)):

        def conv(D: int = D, W: int = W, packed: bool = packed) -> dict:
            B, N = (1, 6) if packed else (2, 2)
            given = {"x": rand(B, 1000, D), "weight": rand(D, W)}
            given |= {"initial_state": rand(N, D, W)}
            if not packed:
                return {**given, "bias": rand(D), "residual": rand(B, 1000, D)}
            cu = torch.tensor([0, 3, 3, 400, 401, 917, 1000], device="cuda")
            return {**given, "cu_seqlens": cu}

        yield like("short_convolution-packed" if packed else "short_convolution", conv)


def error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size else off


def evaluate(run: Callable, args: dict, dout: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients; dout is made if it is empty."""
    args, inputs = leaves(args)
    outputs = run(args)
    if not dout:
        dout += [torch.randn_like(x) for x in outputs]
    grads = torch.autograd.grad(outputs, inputs, [g.to(x.dtype) for g, x in zip(dout, outputs)])
    return [x.detach() for x in outputs] + list(grads)


def compare(block: Block, T: int, D: int, dtype: torch.dtype) -> float:
    """The largest error; nan if two runs differ."""
    args = block.inputs(T, D)
    args = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in cast(args, dtype).items()}
    ours = dataclasses.replace(block, options={**block.options, "impl": "triton"})
    dout: list[Tensor] = []
    got, again = evaluate(ours, args, dout), evaluate(ours, args, dout)
    if not all(torch.equal(x, y) for x, y in zip(got, again)):
        return float("nan")
    want = evaluate(block.want, cast(args, torch.float64), dout)
    return max(error(x, y) for x, y in zip(got, want, strict=True))


def check() -> bool:
    """One line a function and dtype: the worst error over its rows and sizes."""
    worst: dict[tuple, tuple[float, str]] = {}
    small = [(block, 100, 30) for block in BLOCKS]
    skipped = ("attention", "embedding", "token_shift", "short_convolution_update")
    for block, T, D in (*small, *((block, 0, 0) for block in big_cases())):
        name = block.name.split("-")[0]
        if name in skipped:
            continue
        for dtype, limit in LIMITS.items():
            where = f"{block.name} {T, D}"
            try:
                e = compare(block, T, D, dtype)
            except Exception as fault:  # the others go on
                print(f"{where} {dtype}: {type(fault).__name__} {str(fault)[:150]}", flush=True)
                e = float("inf")
            e /= COARSE.get(name, limit) if dtype == BF16 else limit
            if not e <= worst.get((name, dtype), (-1.0, ""))[0]:
                worst[name, dtype] = (e, where)
    worst["huge", BF16] = (check_huge() / LIMITS[BF16], "2^31 elements")
    worst["update", BF16] = (check_update() / LIMITS[BF16], "")
    for dtype in LIMITS:
        limit = COARSE["linear_kl_div"] if dtype == BF16 else LIMITS[dtype]
        try:
            worst["linear_kl_div", dtype] = (check_kl(dtype) / limit, "")
        except Exception as fault:
            worst["linear_kl_div", dtype] = (float("inf"), f"{type(fault).__name__} {fault}"[:150])
    worst["one rank's shard", BF16] = (check_shard() / LIMITS[BF16], "")
    for (name, dtype), (e, where) in worst.items():
        verdict = "ok" if e <= 1 else f"WRONG at {where}"
        print(f"{name:22} {str(dtype)[6:]:9} {e:.2f} of the limit  {verdict}", flush=True)
    return all(e <= 1 for e, _ in worst.values())


def check_huge() -> float:
    """The last rows of a tensor of more than 2^31 elements are those of the rows alone."""
    x = rand((1 << 31) // 2048 + 300, 2048, dtype=BF16).requires_grad_()
    w, tail = rand(2048), x[-200:].detach().requires_grad_()
    dy = rand(200, 2048, dtype=BF16)
    y = rms_norm(x, w)
    full = torch.cat([torch.zeros_like(x[:-200]), dy]).detach()
    (dx,) = torch.autograd.grad(y, x, full)
    want = rms_norm(tail, w, impl="eager")
    (dtail,) = torch.autograd.grad(want, tail, dy)
    return max(error(y[-200:], want), error(dx[-200:], dtail))


def check_update() -> float:
    worst = 0.0
    for D, W in ((100, 4), (4096, 4), (64, 3)):
        x, w, b = rand(9, D, dtype=BF16), rand(D, W), rand(D)
        index = torch.tensor([3, 1, 0, 8, -1, 11, 5, -1, 7], device="cuda")
        found = []
        state = rand(12, W, D, dtype=BF16)
        for impl in ("triton", "eager"):
            pool = state.clone().mT
            options: dict[str, Any] = {"activation": "silu", "state_indices": index, "impl": impl}
            found.append((short_convolution_update(x, pool, w, b, **options), pool))
        worst = max(worst, *(error(a, b) for a, b in zip(*found)))
    return worst


def check_kl(dtype: torch.dtype) -> float:
    """Loss and gradients, with a mask, at odd sizes and at many classes."""
    worst = 0.0
    for N, V, D, E in ((77, 1000, 64, 96), (200, 50257, 64, 64), (130, 151936, 32, 64)):
        shapes = {"student": (N, D), "student_weight": (V, D), "student_bias": (V,)}
        shapes |= {"teacher": (N, E), "teacher_weight": (V, E)}
        given = {name: 0.5 * rand(*shape).to(dtype) for name, shape in shapes.items()}
        mask = torch.rand(N, device="cuda") > 0.2
        found = []
        for impl, wide in (("triton", dtype), ("reference", torch.float64)):
            own: dict[str, Any] = {name: x.to(wide) for name, x in given.items()}
            leaves = [own[n].requires_grad_() for n in shapes if n.startswith("student")]
            loss = linear_kl_div(**own, temperature=2.0, mask=mask, impl=impl)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        worst = max(worst, *(error(x, y) for x, y in zip(*found)))
    return worst


def check_shard() -> float:
    """The kernels as two ranks use them, one after the other: columns, then the gradient."""
    from slipstream.kernels.loss import shard
    from slipstream.kernels.loss.reference import Terms

    V, terms = 50000, Terms(-100, 0.1, 20.0, 1e-3, 0.7)
    logits, target = rand(150, 2 * V, dtype=BF16), torch.randint(0, 2 * V, (150,), device="cuda")
    target[::7] = -100
    wide = logits.double().requires_grad_()
    loss = cross_entropy(
        wide, target, label_smoothing=0.1, softcap=20.0, z_loss=1e-3, logit_scale=0.7,
        reduction="sum", impl="reference",
    )  # fmt: skip
    (want,) = torch.autograd.grad(loss, wide)
    parts = [shard.Shard(i * V, V, 2 * V, None) for i in range(2)]
    halves = [logits[:, i * V : (i + 1) * V] for i in range(2)]
    c = [shard.columns(x, target, terms, p, "triton") for x, p in zip(halves, parts)]
    lse = torch.logaddexp(c[0].lse, c[1].lse)
    ones = torch.ones(150, device="cuda")
    grads = []
    for x, p in zip(halves, parts):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        grads.append(shard.dlogits(x, target, lse, terms, p, ones, "triton", out))
    return error(torch.cat(grads, 1), want)


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=15, rep=60, return_mode="median")


def first(fn: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclasses.dataclass
class Work:
    """units: tensors of `numel` 16-bit elements that must move, forward and backward (0: not
    alone)."""

    name: str
    numel: int
    units: tuple[int, int]
    inputs: list[Tensor]
    call: Callable[..., Tensor]
    peers: dict[str, Callable[..., Tensor]]


def functions(peer: bool) -> dict[str, Callable]:
    """Liger's and fla's, if they can be imported."""
    found: dict[str, Callable] = {}
    if not peer:
        return found
    try:
        from liger_kernel.transformers import functional as liger

        found["rms liger"] = lambda x, w: liger.liger_rms_norm(x, w, 1e-5)
        found["ce liger"] = liger.liger_cross_entropy
        found["linear liger"] = liger.liger_fused_linear_cross_entropy
        found["swiglu liger"] = liger.liger_swiglu
    except ImportError as fault:
        print("no Liger:", fault)
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.modules.layernorm import rms_norm as fla_rms

        found["rms fla"] = lambda x, w: fla_rms(x, w, None, eps=1e-5)
        found["conv fla"] = lambda x, w: causal_conv1d(x, w, activation="silu")[0]
    except ImportError as fault:
        print("no fla:", fault)
    return found


def works(peer: bool) -> Iterator[Callable[[], Work]]:
    known = functions(peer)

    def peers(kind: str) -> dict[str, Callable]:
        return {name.split()[1]: f for name, f in known.items() if name.split()[0] == kind}

    def torch_conv(x: Tensor, w: Tensor) -> Tensor:
        padded = F.pad(x.mT, (w.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, w[:, None], groups=w.shape[0])).mT

    def norm(name: str, R: int, D: int) -> Work:
        x, w = rand(R, D, dtype=BF16), rand(D, dtype=BF16)
        label, shape = f"{name} {R}x{D}", (D,)
        if name == "layer_norm":
            own = {"torch": lambda x, w: F.layer_norm(x, shape, w)}
            return Work(label, x.numel(), (2, 3), [x, w], layer_norm, own)
        if name == "rms_norm":
            own = {"torch": lambda x, w: F.rms_norm(x, shape, w, 1e-5), **peers("rms")}
            return Work(label, x.numel(), (2, 3), [x, w], rms_norm, own)
        other = rand(R, D, dtype=BF16)
        if name == "rms_norm_gated":
            return Work(label, x.numel(), (3, 5), [x, other, w], rms_norm_gated, {})

        def residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
            return rms_norm(x, w, residual=r, prenorm=True)[0]

        return Work(label, x.numel(), (4, 3), [x, other, w], residual, {})

    def heads(name: str) -> Work:
        x = rand(8192, 32 * 128, dtype=BF16)
        if name == "l2_norm":
            return Work("l2_norm 262144x128", x.numel(), (2, 3), [x.view(-1, 128)], l2_norm, {})
        w = rand(4096, dtype=BF16)
        return Work(
            "group_norm 8192x32x128", x.numel(), (2, 3), [x, w],
            lambda x, w: group_norm(x, 32, w), {},
        )  # fmt: skip

    def loss(N: int, V: int, linear: bool) -> Work:
        target = torch.randint(0, V, (N,), device="cuda")
        if not linear:
            given = [rand(N, V, dtype=BF16)]
            own = {"torch": lambda x: F.cross_entropy(x, target)}
            own |= {k: lambda x, f=f: f(x, target) for k, f in peers("ce").items()}
            label = f"cross_entropy {N}x{V}"
            return Work(label, N * V, (0, 2), given, lambda x: cross_entropy(x, target), own)
        given = [rand(N, 2048, dtype=BF16), 0.02 * rand(V, 2048, dtype=BF16)]
        own = {k: lambda h, w, f=f: f(h, w, target) for k, f in peers("linear").items()}
        own = {"torch": lambda h, w: F.cross_entropy(h @ w.t(), target), **own}
        label = f"linear_ce {N}x{V}"
        return Work(label, 0, (0, 0), given, lambda h, w: linear_cross_entropy(h, w, target), own)

    def kl(N: int, V: int) -> Work:
        given = [rand(N, 2048, dtype=BF16), 0.02 * rand(V, 2048, dtype=BF16)]
        y, u = rand(N, 2048, dtype=BF16), 0.02 * rand(V, 2048, dtype=BF16)

        def plain(h: Tensor, w: Tensor) -> Tensor:
            q, p = (F.log_softmax((x @ m.t()).float(), -1) for x, m in ((h, w), (y, u)))
            return F.kl_div(q, p, reduction="batchmean", log_target=True)

        return Work(
            f"linear_kl {N}x{V}", 0, (0, 0), given, lambda h, w: linear_kl_div(h, w, y, u),
            {"torch": plain},
        )  # fmt: skip

    def conv() -> Work:
        x, w = rand(4, 4096, 4096, dtype=BF16), rand(4096, 4, dtype=BF16)
        own = {"torch": torch_conv, **peers("conv")}
        return Work(
            "short_conv 4x4096x4096 W4", x.numel(), (2, 3), [x, w],
            lambda x, w: short_convolution(x, w, activation="silu")[0], own,
        )  # fmt: skip

    def turn() -> Work:
        x, (cos, sin) = rand(4, 4096, 32, 128, dtype=BF16), rotary_tables(torch.arange(4096), 128)
        cos, sin = cos.cuda(), sin.cuda()
        return Work(
            "rotary 4x4096x32x128", x.numel(), (2, 2), [x],
            lambda x: rotary_embedding(x, cos, sin), {},
        )  # fmt: skip

    def glu() -> Work:
        given = [rand(16384, 8192, dtype=BF16) for _ in range(2)]
        own = {"torch": lambda g, u: F.silu(g) * u, **peers("swiglu")}
        return Work("swiglu 16384x8192", given[0].numel(), (3, 5), given, swiglu, own)

    for name in ("rms_norm", "layer_norm", "rms_norm_gated", "rms_norm+residual"):
        yield lambda name=name: norm(name, 32768, 2048)
    yield lambda: norm("rms_norm", 8192, 16384)
    yield lambda: norm("rms_norm", 2048, 65536)
    yield from (lambda n=n: heads(n) for n in ("l2_norm", "group_norm"))
    for linear in (False, True):
        yield lambda linear=linear: loss(16384, 32000, linear)
        yield lambda linear=linear: loss(8192, 151936, linear)
    yield lambda: kl(8192, 32000)
    yield from (conv, turn, glu)


def times(work: Work, who: str, call: Callable[..., Tensor]) -> dict[str, Any]:
    inputs = [x.detach().requires_grad_() for x in work.inputs]
    tb = work.numel * 2 / 1e9  # of one tensor, by ms
    row: dict[str, Any] = {"work": work.name, "who": who, "fwd_ms": "", "fwd_tbs": ""}
    row |= {"bwd_ms": "", "bwd_tbs": "", "both_ms": "", "first_s": "", "peak_gib": ""}
    row["beyond_gib"] = ""

    def both() -> None:
        out = call(*inputs)
        torch.autograd.grad(out, inputs, None if out.dim() == 0 else dy)

    with torch.no_grad():
        dy = torch.randn_like(call(*inputs)) if work.units[0] else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row["first_s"] = f"{first(both):.2f}"
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(x.numel() * x.element_size() for x in inputs)
    row |= {"peak_gib": f"{peak / 2**30:.2f}", "beyond_gib": f"{(peak - grads) / 2**30:.2f}"}
    row["both_ms"] = f"{bench(both):.3f}"
    if not work.units[0]:
        return row
    with torch.no_grad():
        forward = bench(lambda: call(*inputs))
    out = call(*inputs)
    backward = bench(lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True))
    row |= {"fwd_ms": f"{forward:.3f}", "fwd_tbs": f"{work.units[0] * tb / forward:.2f}"}
    row |= {"bwd_ms": f"{backward:.3f}", "bwd_tbs": f"{work.units[1] * tb / backward:.2f}"}
    return row


def all_times(peer: bool) -> None:
    rows = []
    print(f"{'work':27} {'who':6}  fwd ms TB/s   bwd ms TB/s   both ms  first s peak GiB w/o grads")
    for make in works(peer):
        work = make()
        for who, call in {"ours": work.call, **work.peers}.items():
            try:
                row = times(work, who, call)
            except Exception as fault:
                print(f"{work.name} {who}: {type(fault).__name__} {str(fault)[:150]}", flush=True)
                continue
            rows.append(row)
            print(
                f"{row['work']:27} {who:6} {row['fwd_ms']:>7} {row['fwd_tbs']:>4}  "
                f"{row['bwd_ms']:>7} {row['bwd_tbs']:>4}  {row['both_ms']:>8} "
                f"{row['first_s']:>8} {row['peak_gib']:>8} {row['beyond_gib']:>8}",
                flush=True,
            )
        del work
        torch.cuda.empty_cache()
    record("blocks_gpu", rows)


def host_times() -> None:
    """Microseconds a call takes on the host, 200 of them without waiting for the device."""
    x, w = rand(4, 64, dtype=BF16), rand(64, dtype=BF16)
    grads = [t.clone().requires_grad_() for t in (x, w)]
    taps, state = rand(64, 4, dtype=BF16), rand(4, 64, 4, dtype=BF16)
    target = torch.zeros(4, dtype=torch.int64, device="cuda")
    cos, sin = (t.cuda() for t in rotary_tables(torch.arange(4), 16))
    logits = rand(4, 64, dtype=BF16).requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: rms_norm(x, w),
        "rms_norm saving": lambda: rms_norm(grads[0], grads[1]),
        "F.rms_norm": lambda: F.rms_norm(x, (64,), w, 1e-5),
        "layer_norm": lambda: layer_norm(x, w),
        "short_convolution": lambda: short_convolution(x[None], taps, activation="silu"),
        "conv update": lambda: short_convolution_update(x, state, taps, activation="silu"),
        "cross_entropy": lambda: cross_entropy(logits, target),
        "rotary": lambda: rotary_embedding(x.view(1, 4, 4, 16), cos, sin),
        "swiglu": lambda: swiglu(x, x),
    }
    line = []
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        line.append(f"{name} {(time.perf_counter() - start) * 5e3:.0f}")
        torch.cuda.synchronize()
    print("host us a call:", ", ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    fine = options.times or check()
    if not options.check:
        host_times()
        all_times(options.peer)
    raise SystemExit(0 if fine else "results differ from the formulas")


if __name__ == "__main__":
    main()

"""Norms, losses, short convolution, rotary and gated activations on a GPU: right, then how fast.

python bench/blocks_gpu.py            # everything, beside torch
python bench/blocks_gpu.py --check    # only the comparison with the float64 formulas
python bench/blocks_gpu.py --times    # only the times; --peers torch liger fla: if they are there
    --only REGEX                      # of the names of the work, of what is checked
    --once                            # each call once, which compiles what is to be timed
    --host                            # the host's times too, which all works have without --only
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blocks_times import all_times, host_times, rand
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.ops.conv import short_convolution_update
from slipstream.ops.distill import linear_kl_div
from slipstream.ops.loss import cross_entropy
from slipstream.ops.norm import rms_norm
from slipstream.tools.catalog import Sample
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, block_size, cast, leaves

BF16 = torch.bfloat16
# relative RMS error of outputs and gradients; a loss of 16-bit logits that are made on the way
# knows them to 1 / 256 only
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 0.007}
COARSE = {"linear_cross_entropy": 0.05, "linear_kl_div": 0.05}


def big_cases() -> Iterator[tuple[Sample, Callable[[], dict]]]:
    """Rows of the table with inputs of their own: long rows, many rounds, many classes."""
    table = {block.name: block for block in BLOCKS}

    def like(name: str, inputs: Callable[[], dict], **options: Any) -> Any:
        block = table[name]
        return dataclasses.replace(block, options={**block.options, **options}), inputs

    both, gated = ("weight", "bias"), ("gate", "weight")
    plan = {
        (5000, 128): ("rms_norm", "l2_norm", "group_norm"),
        (3001, 2048): ("rms_norm-residual", "layer_norm", "group_norm", "rms_norm_gated"),
        (700, 3000): ("layer_norm", "rms_norm_gated-mamba2"),
        (300, 16384): ("rms_norm", "rms_norm-residual"),
        (40, 20000): ("rms_norm", "rms_norm_gated"),
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

        for kind in ("", "-mean", "-none"):
            yield like(f"cross_entropy{kind}", logits)
            yield like(f"linear_cross_entropy{kind}", hidden)
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


def compare(block: Sample, args: dict, dtype: torch.dtype) -> float:
    """The largest error; nan if two runs differ."""
    args = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in cast(args, dtype).items()}
    ours = partial(block.call, impl="triton")
    dout: list[Tensor] = []
    got, again = evaluate(ours, args, dout), evaluate(ours, args, dout)
    if not all(torch.equal(x, y) for x, y in zip(got, again)):
        return float("nan")
    want = evaluate(partial(wanted, block), cast(args, torch.float64), dout)
    return max(error(x, y) for x, y in zip(got, want, strict=True))


def check(only: re.Pattern[str]) -> bool:
    """One line a function and dtype: the worst error over its rows and sizes."""
    worst: dict[tuple, tuple[float, str]] = {}
    small = [(block, partial(block.inputs, block_size(100, 30))) for block in BLOCKS]
    skipped = ("attention", "embedding", "token_shift", "short_convolution_update")
    for block, make in (*small, *big_cases()):
        name = block.op
        if name in skipped or not only.search(name):
            continue
        for dtype, limit in LIMITS.items():
            args = make()
            where = f"{block.name} {[tuple(x.shape) for x in args.values()]}"
            try:
                e = compare(block, args, dtype)
            except Exception as fault:  # the others go on
                print(f"{where} {dtype}: {type(fault).__name__} {str(fault)[:150]}", flush=True)
                e = float("inf")
            e /= COARSE.get(name, limit) if dtype == BF16 else limit
            if not e <= worst.get((name, dtype), (-1.0, ""))[0]:
                worst[name, dtype] = (e, where)
    for (name, dtype), run in RUNS.items():
        if only.search(name):
            try:
                worst[name, dtype] = (run(), "")
            except Exception as fault:
                worst[name, dtype] = (float("inf"), f"{type(fault).__name__} {fault}"[:150])
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
    from slipstream.kernels.loss.reference import LossInputs

    V, terms = 50000, LossInputs(-100, 0.1, 20.0, 1e-3, 0.7)
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


# what the table of blocks has not: by name and dtype, the error as a part of the limit
RUNS: dict[tuple, Callable[[], float]] = {
    ("huge", BF16): lambda: check_huge() / LIMITS[BF16],
    ("update", BF16): lambda: check_update() / LIMITS[BF16],
    ("linear_kl_div", torch.float32): lambda: check_kl(torch.float32) / LIMITS[torch.float32],
    ("linear_kl_div", BF16): lambda: check_kl(BF16) / COARSE["linear_kl_div"],
    ("one rank's shard", BF16): lambda: check_shard() / LIMITS[BF16],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "once", "host"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--peers", nargs="*", default=["torch"])
    parser.add_argument("--only", default="", type=re.compile)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    fine = options.times or check(options.only)
    if not options.check:
        if options.host or not options.only.pattern:
            host_times()
        all_times(options.peers, options.only, options.once)
    raise SystemExit(0 if fine else "results differ from the formulas")


if __name__ == "__main__":
    main()

"""Building blocks under torch.compile on a GPU: our operators in the graph, or Inductor's own code.

python bench/compiled_gpu.py            # milliseconds of the device, forward and both
python bench/compiled_gpu.py --host     # host time of calls without torch.compile, in us
python bench/compiled_gpu.py --memory   # glu_linear beside its parts
--once                                  # compiles all of it
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from ahead import in_turns
from torch import Tensor

from slipstream import ops
from slipstream.ops.activation import glu_linear

BF16 = torch.bfloat16


def rand(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).requires_grad_(grad)


def works() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Called with impl=."""
    wide, cos_sin = rand(1, 16384, 2048), ops.rotary_tables(torch.arange(4096, device="cuda"), 128)
    target = torch.randint(0, 32000, (8192,), device="cuda")
    cu = torch.tensor([0, 100, 5000, 5001, 9000, 16384], device="cuda")

    def shift(x: Tensor, impl: str) -> Tensor:
        return torch.lerp(x, ops.token_shift(x, impl=impl, cu_seqlens=cu)[0], 0.3)

    return {
        "swiglu 16384 x 8192": (ops.swiglu, [rand(16384, 8192), rand(16384, 8192)]),
        "rotary 4 x 4096 x 32 x 128": (
            lambda x, impl: ops.rotary_embedding(x, *cos_sin, impl=impl),
            [rand(4, 4096, 32, 128)],
        ),
        "conv packed 16384 x 2048": (
            lambda x, w, impl: ops.short_convolution(
                x, w, activation="silu", cu_seqlens=cu, impl=impl
            )[0],
            [wide, rand(2048, 4)],
        ),
        "cross_entropy 8192 x 32000": (
            lambda x, impl: ops.cross_entropy(x, target, impl=impl),
            [rand(8192, 32000)],
        ),
        "token_shift packed + lerp": (shift, [wide]),
    }


def times(once: bool, only: str) -> None:
    print("ms of forward + backward: not compiled; compiled with our kernel; with Inductor's")
    for name, (call, inputs) in works().items():
        if only not in name:
            continue
        torch.compiler.reset()
        dout = torch.randn_like(call(*inputs, impl="triton"))
        runs: list[Callable[[], Any]] = []
        for impl, compiled in (("triton", False), ("triton", True), ("eager", True)):

            def run(*given: Tensor, impl: str = impl, call: Callable = call) -> Tensor:
                return call(*given, impl=impl)

            f = torch.compile(run, fullgraph=True, dynamic=False) if compiled else run

            def both(f: Callable = f, inputs: list = inputs, dout: Tensor = dout) -> None:
                torch.autograd.grad(f(*inputs), inputs, dout)

            runs.append(both)
        if once:
            for each in runs:
                each()
        else:
            print(f"{name:28}", *(f"{x:.3f}" for x in in_turns(runs, 7)), flush=True)


def shifts() -> None:
    """Its kernel, plain torch, fla's (which subtracts x), of 128 MiB."""
    x = rand(1, 16384, 4096)
    cu = torch.tensor([0, 100, 5000, 5001, 9000, 16384], device="cuda")
    for name, given in (("dense", None), ("packed", cu)):
        calls: list[Callable[[], Tensor]] = [
            lambda impl=impl, given=given: ops.token_shift(x, impl=impl, cu_seqlens=given)[0]
            for impl in ("triton", "eager")
        ]
        try:
            from fla.modules.token_shift import token_shift

            calls.append(lambda given=given: token_shift(x, given))
        except ImportError:
            pass

        def both(call: Callable[[], Tensor]) -> Any:
            y = call()
            return torch.autograd.grad(y, x, y.detach())

        with torch.no_grad():
            forward = in_turns(calls, 15)
        there_and_back = in_turns([lambda call=call: both(call) for call in calls], 15)
        row = [f"{a:.4f} {b:.4f}" for a, b in zip(forward, there_and_back)]
        print(f"token_shift {name}, ms forward and both:", " | ".join(row), flush=True)


def host() -> None:
    x, w = rand(1, 256, 1024), rand(1024, 4)
    heads = x.detach().view(1, 256, 8, 128).requires_grad_()
    cos, sin = ops.rotary_tables(torch.arange(256, device="cuda"), 128)
    state, logits = torch.randn(256, 1024, 4, device="cuda"), rand(256, 512)
    token, target = x[0].detach(), torch.randint(0, 512, (256,), device="cuda")
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "swiglu": (lambda: ops.swiglu(x, x), [x]),
        "rotary": (lambda: ops.rotary_embedding(heads, cos, sin), [heads]),
        "conv": (lambda: ops.short_convolution(x, w, activation="silu")[0], [x, w]),
        "token_shift": (lambda: ops.token_shift(x)[0], [x]),
        "cross_entropy": (lambda: ops.cross_entropy(logits, target), [logits]),
        "conv update": (lambda: ops.short_convolution_update(token, state, w), []),
    }
    print("us of the host: forward without gradients, forward and backward")
    for name, (call, inputs) in calls.items():

        def both(call: Callable = call, inputs: list = inputs) -> None:
            y = call()
            torch.autograd.grad(y, inputs, torch.ones_like(y))

        with torch.no_grad():
            row = [of_host(call)]
        row += [of_host(both)] if inputs else []
        print(f"{name:16}", *(f"{x:.1f}" for x in row), flush=True)


def of_host(call: Callable[[], Any], each: int = 50) -> float:
    found = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            call()
        found.append((time.perf_counter() - start) / each * 1e6)
    return min(found)


def memory() -> None:
    x = rand(16384, 2048, grad=False)
    w_gate, w_up, w_down = (rand(*shape) for shape in ((8192, 2048), (8192, 2048), (2048, 8192)))
    linear = torch.nn.functional.linear

    def parts() -> Tensor:
        return linear(ops.swiglu(linear(x, w_gate), linear(x, w_up)), w_down)

    def joined() -> Tensor:
        return glu_linear(linear(x, w_gate), linear(x, w_up), w_down)

    def plain() -> Tensor:
        silu = torch.nn.functional.silu
        return linear(silu(linear(x, w_gate)) * linear(x, w_up), w_down)

    dy = torch.randn(16384, 2048, device="cuda", dtype=BF16)
    runs = []
    for name, call in (("parts", parts), ("glu_linear", joined), ("torch", plain)):

        def run(call: Callable = call) -> None:
            torch.autograd.grad(call(), [w_gate, w_up, w_down], dy)

        run()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call()
        kept = torch.cuda.memory_allocated() - before
        del y
        run()
        peak = torch.cuda.max_memory_allocated() - before
        print(f"{name:12} kept {kept / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB")
        runs.append(run)
    print("ms forward + backward:", *(f"{x:.3f}" for x in in_turns(runs, 9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("host", "memory", "once", "shifts"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.host:
        host()
    elif args.memory:
        memory()
    elif args.shifts:
        shifts()
    else:
        times(args.once, args.only)


if __name__ == "__main__":
    main()

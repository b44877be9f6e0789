"""Peak memory of the linear attention family, beyond inputs, results and gradients.

    python bench/memory.py                     every chunk operator, beside fla if it is installed
    python bench/memory.py --packed            4 packed sequences
    python bench/memory.py --peer flash_qla    the gated delta rule beside FlashQLA

T 8192, 32 heads, K = V = 128, bf16. forward: without gradients; both: a forward and its backward.
Percent are of inputs and results, and for both of the gradients too. What fla takes does not depend
on its tiles, so that only the first configuration of each of its kernels is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness import DEVICE, Provider, Report, parser, peak_bytes
from linear import FLASH_QLA_SHAPES, fla, ours

from slipstream.tools.catalog import Shape, chosen, family

PLAIN = Shape(B=1, T=8192, H=32)
PACKED = Shape(B=4, T=8192, H=32, packed=True)


def untuned() -> None:
    """From here on Triton's autotuner takes the first configuration of each kernel."""
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs

    def first(self: Any, kwargs: Any) -> list[Any]:
        return sorted(pruned(self, kwargs), key=lambda x: (x.num_stages, x.num_warps))[:1]

    Autotuner.prune_configs = first


def beyond(provider: Provider) -> dict[str, object]:
    def forward() -> list[torch.Tensor | None]:
        with torch.no_grad():
            return [*provider.outputs()]

    def both() -> list[torch.Tensor | None]:
        outs = provider.outputs()
        return [*outs, *provider.back(outs[0])]

    found: dict[str, object] = {}
    for name, call in (("forward", forward), ("both", both)):
        results: list[torch.Tensor | None] = []

        def run(call: Callable[[], list] = call, results: list = results) -> None:
            results[:] = call()

        for _ in range(2):  # the first call compiles, and may remember what it made
            run()
            results.clear()
        peak = peak_bytes(run)
        size = sum(x.nbytes for x in results if x is not None)
        held = provider.nbytes + size
        if name == "both" and provider.dout is not None:
            held += provider.dout.nbytes
        found[f"{name} MiB"] = round((peak - size) / 2**20)
        found[f"{name} %"] = round(100 * (peak - size) / held, 1)
    return found


def row(providers: Mapping[str, Callable[..., Any]], args: Mapping[str, Any]) -> dict[str, object]:
    cells: dict[str, object] = {}
    for who, fn in providers.items():
        try:
            found = beyond(Provider(fn, args))
        except Exception as e:
            if not who:
                raise
            cells["note"] = f"{who}: {type(e).__name__}: {str(e)[:80]}"
            continue
        cells |= {f"{who}{name}": x for name, x in found.items()}
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--peer", choices=("fla", "flash_qla", "none"), default="fla")
    options.add_argument("--packed", action="store_true")
    given = options.parse_args(argv)
    report = Report(given)
    work: list[tuple[str, Shape, Any]] = [
        (x.op, PACKED if given.packed else PLAIN, x)
        for x in {x.op: x for x in reversed(chosen(None))}.values()
        if x.op.startswith("chunk_")
    ][::-1]
    if given.peer == "flash_qla":
        gated = chosen(["chunk_gated_delta_rule"])[0]
        work = [(name, shape, gated) for name, shape in FLASH_QLA_SHAPES.items()]
    elif given.peer == "fla":
        try:
            untuned()
        except ImportError as e:
            print(e)
    for name, shape, sample in work:
        if not report.wants(name):
            continue
        with report.going_on(name):
            providers = {"": partial(ours(sample), output_final_state=True)}
            try:
                if given.peer == "fla":
                    providers["fla "] = partial(fla(sample), output_final_state=True)
                elif given.peer == "flash_qla":
                    import flash_qla  # pyright: ignore[reportMissingImports]

                    providers = {"": ours(sample), "FlashQLA ": flash_qla.chunk_gated_delta_rule}
            except ImportError as e:
                print(f"{name}: {e}")
            args = sample.inputs(report.shape(shape), DEVICE)
            cells: dict[str, object] = {"operator": sample.op}
            if given.peer == "flash_qla":
                cells = {"operator": family(sample.op), "shape": name}
            elif given.packed:
                cells["shape"] = str(shape)
            report.row("memory_gpu", cells | row(providers, args))
    report.end()


if __name__ == "__main__":
    main()

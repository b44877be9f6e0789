"""Layers of serving engines: slipstream's calls beside the engine's own Triton kernels.

    make engines                          fetches the engines' files into .engines
    python bench/engines.py               SGLang 0.5.16, a token of each sequence
    python bench/engines.py --only Mamba

bf16, states in float32. GDN has 16 heads of queries and 32 of values, 128 wide, as Qwen3-Next has;
Mamba-2 128 heads of 64 in 8 groups with 128 states, as Nemotron-H 8B has. ours and theirs: of a
call, from a CUDA graph of ten, with a warm L2 cache. theirs is empty without the engine's files,
and on a CPU. The rows of 2026-11-29 are of graphs of eight calls.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import DEVICE, Report, graph_ms, parser

from slipstream.integrations import sglang_functions
from slipstream.integrations.sglang import GDNKernel
from slipstream.runtime import compile_ahead

ROOT = Path(__file__).parents[1]
RELEASE = "sglang-0.5.16"
BATCHES = (1, 8, 64)
Calls = tuple[Callable[[], Any], Callable[[], Any] | None]
FOLDERS = ["sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.linear.kernels"]
FOLDERS += ["sglang.kernels.ops.mamba.triton_ops"]


@contextmanager
def kernels() -> Iterator[tuple[Any, Any]]:
    """SGLang's kernel of GDN and its update of Mamba's states, or None for each."""
    if DEVICE.type == "cpu" or not (ROOT / ".engines" / RELEASE).is_dir():
        print(f"{RELEASE} is left out")
        yield None, None
        return
    sys.path.append(str(ROOT))
    from tests.support.engines import loaded

    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    answers: dict[str, Any] = {"torch_release": version, "is_cpu": lambda: False}
    given = {"sglang__srt__utils": answers, "sglang__srt__utils__common": answers}
    with loaded(RELEASE, *FOLDERS, **given):
        gdn = sys.modules[f"{FOLDERS[1]}.gdn_triton"]
        yield gdn.TritonGDNKernel(), sys.modules[f"{FOLDERS[2]}.mamba_ssm"].selective_state_update


def gdn(N: int, small: bool, theirs: Any) -> Calls:
    H, HV, width = (1, 2, 16) if small else (16, 32, 128)
    given: dict[str, Any] = {
        "mixed_qkv": torch.randn(N, (2 * H + HV) * width, dtype=torch.bfloat16),
        "a": torch.randn(N, HV, dtype=torch.bfloat16),
        "b": torch.randn(N, HV, dtype=torch.bfloat16),
        "A_log": torch.rand(HV),
        "dt_bias": torch.rand(HV),
        "scale": width**-0.5,
        "ssm_states": torch.randn(N + 1, HV, width, width) * 0.1,
        "cache_indices": torch.arange(1, N + 1, dtype=torch.int32),
        "num_v_heads": HV,
        "head_v_dim": width,
    }
    return partial(GDNKernel().packed_decode, **given), theirs and partial(
        theirs.packed_decode, **given
    )


def mamba2(N: int, small: bool, theirs: Any) -> Calls:
    H, P, G, S = (2, 16, 1, 16) if small else (128, 64, 8, 128)
    x = torch.randn(N, H, P, dtype=torch.bfloat16)
    given: dict[str, Any] = {
        "state": torch.randn(N + 1, H, P, S) * 0.1,
        "x": x,
        "dt": torch.randn(N, H, 1, dtype=torch.bfloat16).expand(N, H, P),
        "A": (-torch.rand(H, 1, 1) - 0.1).expand(H, P, S),
        "B": torch.randn(N, G, S, dtype=torch.bfloat16),
        "C": torch.randn(N, G, S, dtype=torch.bfloat16),
        "D": torch.randn(H, 1).expand(H, P),
        "dt_bias": torch.randn(H, 1).expand(H, P),
        "dt_softplus": True,
        "state_batch_indices": torch.arange(1, N + 1, dtype=torch.int32),
        "out": torch.empty_like(x),
    }
    ours = partial(sglang_functions.selective_state_update, **given)
    return ours, theirs and partial(theirs, **given)


def row(
    model: str, N: int, make: Callable[..., Calls], theirs: Any, report: Report
) -> Mapping[str, object]:
    both = make(N, report.options.small, theirs)
    both[0]()
    compile_ahead.finish()
    us = [graph_ms(x, report.runs(20)) * 1e3 for x in both if x is not None]
    engine, _, version = RELEASE.partition("-")
    cells = {"engine": engine, "version": version, "model": model, "case": f"decode batch {N}"}
    cells |= {"ours": f"{us[0]:.1f}", "theirs": "", "unit": "us", "ratio": ""}
    if len(us) > 1:
        cells |= {"theirs": f"{us[1]:.1f}", "ratio": f"{us[0] / us[1]:.2f}"}
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    with torch.device(DEVICE), kernels() as (gdns, mambas):
        models = {"GDN 16/32x128": (gdn, gdns), "Mamba-2 128x64 state 128": (mamba2, mambas)}
        report.measure(
            (f"{model} {N}", "engines", partial(row, model, N, *parts, report))
            for model, parts in models.items()
            for N in BATCHES
        )


if __name__ == "__main__":
    main()

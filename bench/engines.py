"""Layers of serving engines: slipstream's calls beside the engine's own Triton kernels.

    make engines                          fetches the engines' files into .engines
    python bench/engines.py               SGLang 0.5.16: a token of each sequence, and prompts
    python bench/engines.py --only Mamba

bf16, states in float32. GDN has 16 heads of queries and 32 of values, 128 wide, as Qwen3-Next has;
KDA 32 heads of 128, as Kimi Linear; Mamba-2 128 heads of 64 in 8 groups with 128 states, as
Nemotron-H 8B; lightning attention 32 heads of 128, as Ling. ours and theirs: of a token, from a
CUDA graph of ten calls, with a warm L2 cache; of prompts, with a cold one, by calls. changed: of
how many tokens the largest of 4,096 random logits of the output is another one. compilations: of
ours, after a layer's first token or prompt and what these have compiled in the background. theirs
and changed are empty without the engine's files, and on a CPU. The rows of 2026-11-29 are of graphs
of eight calls; those of vLLM are bench/engine_models.py's.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from harness import BF16, DEVICE, Report, graph_ms, in_turns, parser
from torch import Tensor
from triton import knobs

from slipstream.integrations import sglang, sglang_functions
from slipstream.runtime import compile_ahead

ROOT = Path(__file__).parents[1]
RELEASE = "sglang-0.5.16"
CASES: dict[str, tuple[int, ...]] = {f"decode batch {n}": (1,) * n for n in (1, 8, 64)}
CASES |= {"prefill 1x8192": (8192,), "prefill 8x1024": (1024,) * 8}
WORDS = 4096
FLA, MAMBA = "sglang.kernels.ops.attention.fla", "sglang.kernels.ops.mamba.triton_ops"
KERNELS = "sglang.srt.layers.attention.linear.kernels"
LIGHTNING = "sglang.kernels.ops.attention.linear.seg_la"


@dataclass
class Work:
    """pool: the states that call(kernels) -> o [T, ...] moves on. N sequences, in slots 1 to N."""

    pool: Tensor
    call: Callable[[Any], Tensor]


@contextmanager
def engine() -> Iterator[Any]:
    """SGLang's kernels under the names of ours, or None."""
    if DEVICE.type == "cpu" or not (ROOT / ".engines" / RELEASE).is_dir():
        print(f"{RELEASE} is left out")
        yield None
        return
    sys.path.append(str(ROOT))
    from tests.support.engines import loaded

    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    answers: dict[str, Any] = {"torch_release": version, "is_cpu": lambda: False}
    answers |= {"is_npu": lambda: False}
    given = {"sglang__srt__utils": answers, "sglang__srt__utils__common": answers}
    with loaded(RELEASE, FLA, KERNELS, MAMBA, LIGHTNING, **given):
        names = (f"{KERNELS}.gdn_triton", f"{KERNELS}.kda_triton", f"{MAMBA}.mamba_ssm")
        gdn, kda, states, scans, seg_la = map(
            import_module, (*names, f"{MAMBA}.ssd_combined", LIGHTNING)
        )
        yield SimpleNamespace(
            gdn=gdn.TritonGDNKernel(),
            kda=kda.TritonKDAKernel(),
            update=states.selective_state_update,
            scan=scans.mamba_chunk_scan_combined,
            lightning=seg_la.seg_la_fwd,
        )


def ours() -> Any:
    return SimpleNamespace(
        gdn=sglang.GDNKernel(),
        kda=sglang.KDAKernel(),
        update=sglang_functions.selective_state_update,
        scan=sglang_functions.mamba_chunk_scan_combined,
        lightning=sglang_functions.seg_la_fwd,
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=BF16)


def at(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Slots and offsets of sequences."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.arange(1, len(lengths) + 1, dtype=torch.int32), offsets


def delta(kind: str, lengths: Sequence[int], small: bool) -> Work:
    """Of Gated DeltaNet, or of KDA."""
    H, HV, width = (1, 2, 16) if small else (16 if kind == "gdn" else 32, 32, 128)
    N, T, gates = len(lengths), sum(lengths), HV * (width if kind == "kda" else 1)
    pool, (slots, offsets) = torch.randn(N + 1, HV, width, width) * 0.1, at(lengths)
    A_log, dt_bias = torch.rand(HV), torch.rand(gates)
    a, b = normal(T, gates), normal(T, HV)
    common: dict[str, Any] = {"ssm_states": pool, "cache_indices": slots}
    if T == N:
        mixed = normal(T, (2 * H + HV) * width)
        common |= {"A_log": A_log, "dt_bias": dt_bias, "scale": width**-0.5}
        common |= {"num_v_heads": HV, "head_v_dim": width}
        return Work(pool, lambda x: getattr(x, kind).packed_decode(mixed, a, b, **common)[0])
    parts = [normal(1, T, n, width) for n in (H, H, HV)]
    common["query_start_loc"] = offsets
    if kind == "gdn":
        parts += [F.logsigmoid(a.float())[None], b.float().sigmoid()[None]]
        return Work(pool, lambda x: x.gdn.extend(*parts, **common)[0][0])
    parts += [a.view(1, T, HV, width), b.float().sigmoid()[None]]
    common |= {"A_log": A_log, "dt_bias": dt_bias}
    return Work(pool, lambda x: x.kda.extend(*parts, **common)[0])


def mamba2(lengths: Sequence[int], small: bool) -> Work:
    H, P, G, S = (2, 16, 1, 16) if small else (128, 64, 8, 128)
    N, T, (slots, offsets) = len(lengths), sum(lengths), at(lengths)
    pool, x, out = torch.randn(N + 1, H, P, S) * 0.1, normal(T, H, P), normal(T, H, P)
    dt, B, C, A = normal(T, H), normal(T, G, S), normal(T, G, S), -torch.rand(H) - 0.1
    D, bias = torch.randn(H), torch.randn(H)
    if T == N:

        def update(kernels: Any) -> Tensor:
            kernels.update(
                pool, x, dt[..., None].expand(T, H, P), A[:, None, None].expand(H, P, S), B, C,
                D=D[:, None].expand(H, P), dt_bias=bias[:, None].expand(H, P), dt_softplus=True,
                state_batch_indices=slots, out=out,
            )  # fmt: skip
            return out

        return Work(pool, update)
    # SGLang's chunks, which begin where sequences do here
    size = min(256, min(lengths))
    chunks = torch.arange(-(-T // size)).int()
    sequences = torch.repeat_interleave(torch.arange(N), torch.tensor(lengths)).int()[None]

    def scan(kernels: Any) -> Tensor:
        _, states = kernels.scan(
            x[None], dt[None], A, B[None], C[None], chunk_size=size, D=D, dt_bias=bias,
            seq_idx=sequences, cu_seqlens=offsets, chunk_indices=chunks,
            chunk_offsets=torch.zeros_like(chunks), initial_states=pool[1:], dt_softplus=True,
            return_varlen_states=True, return_intermediate_states=True, out=out[None],
            state_dtype=torch.float32,
        )  # fmt: skip
        pool[1:] = states
        return out

    return Work(pool, scan)


def lightning(lengths: Sequence[int], small: bool) -> Work:
    H, width = (2, 64) if small else (32, 128)
    N, T, (slots, offsets) = len(lengths), sum(lengths), at(lengths)
    pool, parts = torch.randn(N + 1, H, width, width) * 0.1, [normal(T, H, width) for _ in range(3)]
    meta = SimpleNamespace(
        batch_size=N, max_q_length=None, q_offsets=offsets, s_offsets=slots, mask=None,
        q_lengths=offsets.diff(), s_scales=torch.ones(N, dtype=torch.bool),
    )  # fmt: skip
    decay = torch.rand(H) * 0.5
    return Work(pool, lambda x: x.lightning(*parts, pool, decay, meta))


MODELS: dict[str, Callable[[Sequence[int], bool], Work]] = {
    "GDN 16/32x128": partial(delta, "gdn"),
    "KDA 32x128": partial(delta, "kda"),
    "Mamba-2 128x64 state 128": mamba2,
    "Lightning 32x128": lightning,
}
compiled: list[object] = []
seen: set[str] = set()


def words(work: Work, kernels: Any, head: Tensor) -> Tensor:
    """The largest logit of each token, from the same states."""
    before = work.pool.clone()
    o = work.call(kernels)
    work.pool.copy_(before)
    return (o.reshape(o.shape[0], -1).float() @ head).argmax(-1)


def row(model: str, case: str, theirs: Any, report: Report) -> Mapping[str, object]:
    lengths = CASES[case]
    if report.options.small:
        lengths = tuple(min(n, 16) for n in lengths[:3])
    work, mine = MODELS[model](lengths, report.options.small), ours()
    # the first token and the first prompt compile, other cases' kernels in the background
    if (kind := f"{model} {case.split()[0]}") not in seen:
        work.call(mine)
        compile_ahead.finish()
        seen.add(kind)
    before = len(compiled)
    o = work.call(mine)
    engine_name, _, version = RELEASE.partition("-")
    cells: dict[str, object] = {"engine": engine_name, "version": version, "model": model}
    cells |= {"case": case, "ours": "", "theirs": "", "unit": "us", "ratio": "", "changed": ""}
    cells["compilations"] = len(compiled) - before
    both = {"ours": mine} | ({} if theirs is None else {"theirs": theirs})
    calls = {name: partial(work.call, kernels) for name, kernels in both.items()}
    if sum(lengths) == len(lengths):
        times = {name: graph_ms(call, report.runs(20)) for name, call in calls.items()}
    else:
        times = in_turns(calls, report.runs(20))
    cells |= {name: f"{ms * 1e3:.1f}" for name, ms in times.items()}
    if theirs is not None:
        head = torch.randn(o[0].numel(), WORDS)
        got, want = (words(work, x, head) for x in both.values())
        cells["changed"] = f"{int((got != want).sum())} of {len(got)}"
        cells["ratio"] = f"{times['ours'] / times['theirs']:.2f}"
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    knobs.runtime.jit_cache_hook = lambda **given: compiled.append(given.get("fn")) or False
    with torch.device(DEVICE), engine() as theirs:
        report.measure(
            (f"{model} {case}", "engines", partial(row, model, case, theirs, report))
            for model in MODELS
            for case in CASES
        )


if __name__ == "__main__":
    main()

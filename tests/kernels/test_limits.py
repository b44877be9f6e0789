"""What kernels take up to a limit, and what is planned by one: the last number on each side."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.compiler.arch import ARCHS
from slipstream.integrations import masks, serving
from slipstream.kernels.attention import cache
from slipstream.kernels.attention import plan as attention
from slipstream.kernels.attention import rotary as rotated
from slipstream.kernels.attnres import op as attnres
from slipstream.kernels.conv import op as conv
from slipstream.kernels.elementwise import copy_states, rotation, token_shift
from slipstream.kernels.elementwise.triton import rotary
from slipstream.kernels.hyper_connection import op as hyper
from slipstream.kernels.linear import decode, inputs, segments
from slipstream.kernels.linear import op as linear
from slipstream.kernels.linear import plan as sm90
from slipstream.kernels.linear import plan as triton_plan
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import context, memory
from slipstream.kernels.linear.sm90.delta import bwd_schedule
from slipstream.kernels.linear.sm90.dplr.backend import supports_dqkg
from slipstream.kernels.linear.sm90.scalar_decay import backend as scalar_sm90
from slipstream.kernels.linear.triton.dplr import backend as dplr
from slipstream.kernels.linear.triton.vector_decay import tiles as vector_decay
from slipstream.kernels.loss import shard
from slipstream.kernels.loss.triton import cross_entropy as loss
from slipstream.kernels.matmul import config
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.mixer_step import inputs as drafts
from slipstream.kernels.mixer_step import op as step
from slipstream.kernels.mixer_step.triton import launch as step_launch
from slipstream.kernels.projection_step import inputs as rows
from slipstream.kernels.projection_step import op as projection
from slipstream.kernels.projection_step import triton_kernels as projected
from slipstream.kernels.selected_attention import op as selected
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from slipstream.kernels.selective_scan import op as scan
from slipstream.kernels.time_mix import rwkv7_step
from slipstream.kernels.time_mix.triton import rwkv7
from slipstream.layers import Attention
from slipstream.nn import projections
from slipstream.runtime import backends, guarded_launch

BF16, FP32 = torch.bfloat16, torch.float32
IEEE = config.Problem(FP32, FP32, "ieee")
X = torch.zeros(1, 4, 1, 64, dtype=BF16)
TILE: Any = SimpleNamespace(tma=True, stages=2)


def m(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of(kind: Any, **fields: Any) -> Any:
    """Of a NamedTuple, the other fields None."""
    return kind(**{**dict.fromkeys(kind._fields), **fields})


def terms(K: int = 64, V: int = 64, T: int = 4, HV: int = 1, **more: Tensor) -> LinearInputs:
    return LinearInputs(m(1, T, 1, K), m(1, T, 1, K), m(1, T, HV, V), **more)


def gated(K: int = 64, T: int = 4) -> LinearInputs:
    return terms(K, T=T, HV=2, g=m(1, T, 1, K))


def projecting(M: int = 1, N: int = 8, K: int = 8, **more: Any) -> Any:
    return of(rows.ProjectionInputs, x=m(M, K), weights=[m(N, K)], biases=[None], **more)


def stepping(K: int = 8, T: int = 1, V: int = 8, taps: int = 4, **more: Any) -> Any:
    q, v, state = m(1, T, 1, K), m(1, T, 1, V), m(1, 1, K, V)
    return of(step.StepInputs, q=q, k=q, v=v, state=state, conv_weight=m(8, taps), **more)


def drafted(T: int) -> bool:
    options = of(step.StepOptions, pending=2, dt_scales_v=False, norm_group_size=64)
    return drafts.drafts_on_sm90(stepping(64, T, 64, num_accepted=m(1)), options)


def on_a_gpu(
    width: int, dtype: torch.dtype, at: tuple[int, int] = (9, 0), of: torch.dtype = torch.int8
) -> str | None:
    """What reads a cache of another dtype."""
    q: Any = SimpleNamespace(shape=(1, 1, 1, width), dtype=dtype, is_cuda=True, device=None)
    code: Any = SimpleNamespace(shape=q.shape, dtype=of)
    with mock.patch("torch.cuda.get_device_capability", return_value=at):
        return attention.cache_unsupported_reason((q, code, code))


def by_token(T: int) -> bool:
    with mock.patch.object(linear.plan, "only_by_token", return_value=False):
        return linear._goes_by_token(terms(T=T), SimpleNamespace(chunk=0), None)


def also_by_token(T: int) -> bool:
    """Whether calls of T tokens in chunks are compiled for tokens one by one, too."""
    sizes = linear.with_short(lambda args: iter([args]), 1)
    assert len([*sizes((m(1, T), 0))]) == 1  # they are
    return len([*sizes((m(1, T), 64))]) == 2


def scanned(T: int, programs: int = 1) -> Any:
    with mock.patch.object(segments.consistent_scope, "on", True):
        return segments.scanned_sm90(terms(T=T), programs)


def fused_when_packed(sequences: int) -> bool:
    """Of KDA's, with half as many heads as one sequence wants."""
    H, cu = segments.FUSED_FWD_MIN_PROGRAMS // 2, m(sequences + 1)
    g, beta = m(1, 4, 1, 128, dtype=FP32), m(1, 4, H)
    return segments.uses_fused_fwd(terms(128, 128, HV=H, g=g, beta=beta, cu_seqlens=cu))


def in_two_kernels(T: int) -> bool:
    """Whether a backward of segments leaves S of all chunks."""
    with mock.patch.object(bwd_schedule.segmentation, "num_fused_bwd", return_value=2):
        return bwd_schedule.choose_schedule(terms(96, T=T, beta=m(1, T, 1))) is None


def of_equal_blocks(chunks: int) -> bool:
    given = terms(64, 2 * segments.TILE_V, 4 * chunks * 64, beta=m(1, 4, 1))
    return bwd_schedule.schedule_of_segments(given, chunks * 64) is not None


def copies_gates(stride: int) -> bool:
    """Whether gates [1, 4, 2] of a head come side by side."""
    g = torch.zeros(16).as_strided((1, 4, 2), (16, stride, 8))
    got = scalar_sm90.BACKEND.to_kernel_layout(LinearInputs(X, X, X.repeat(1, 1, 2, 1), g=g)).g
    assert got is not None
    return got.data_ptr() != g.data_ptr()


def shares(V: int) -> bool:
    """Whether programs of one head share its window, or its norm."""
    given = stepping(64, V=V, conv_state=m(1, 3 * 64, 4))
    options = of(step.StepOptions, norm_group_size=V)
    window = step_launch.counters_per_slot(given, options) is not None
    return window or step_launch._shares_norm(given, options._replace(norm_eps=1e-6))


def scan_is_exact(K: int) -> bool:
    tile: Any = SimpleNamespace(warps=4, stages=2, C=64, B=64)
    made = {"fp32_dot_precision": lambda: "fast", "tile_of": lambda terms: (tile, 64)}
    with mock.patch.multiple(dplr, **made):
        return dplr._launch_options(terms(K), tile, True)["PRECISION"] == "ieee"


def selects(keys: int, entries: int, width: int = 8) -> str | None:
    q, lists = m(1, 1, 1, width), m(1, 1, 1, entries, dtype=torch.int32)
    inputs = SelectedInputs(q, *[m(1, keys, 1, width)] * 2, lists)
    return selected.unsupported_reason(inputs, SelectedOptions(1.0, -1, 0, True, 1, False))


def makes_norms(D: int) -> bool:
    yes = mock.Mock(return_value=True)
    norms = mock.patch.object(projections.op, "takes", yes)
    with mock.patch.object(projections, "fuses", yes), norms:
        return projections.makes_norms(m(1, 1, D))


def writes_in_kernel(D: int) -> bool:
    k: Any = SimpleNamespace(is_cuda=True, dtype=BF16)
    return Attention._writes_in_kernel(mock.Mock(head_dim=D), k, {"k": k})


def refuses(call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except NotImplementedError:
        return True
    return False


def angles(n: int = 1, K: int = 8) -> tuple[Tensor, ...]:
    return m(1, 1, n, K), m(1, 1, n, K), m(1, 1, 1, 2, dtype=FP32)


# why a call with such a number is not taken, or planned another way; the last that is, and the next
LIMITS: dict[str, tuple[Callable[[int], Any], int] | tuple[Callable[[int], Any], int, int]] = {
    "residuals": (
        lambda n: attnres._unsupported_reason(m(2, 8), [m(2, 8)] * n, None), attnres.STREAMS),
    "features": (lambda n: attnres._unsupported_reason(m(2, n), [m(2, n)], None), attnres.WIDEST),
    "rows": (lambda n: attnres._unsupported_reason(m(n, 8), [m(n, 8)], None), 2**31 - 1),
    "streams": (lambda n: hyper.unsupported_reason(m(2, n, 8)), hyper.STREAMS),
    "streams' tokens": (lambda n: hyper.unsupported_reason(m(n, 4, 8)), 2**31 - 1),
    "lists' entries": (lambda n: selects(1, n), 2**31 - 1),
    "keys of lists": (lambda n: selects(n, 1), 2**26 - 1),
    "channels of lists": (lambda n: selects(1, 1, n), 256),
    "scanned tokens": (lambda n: "32 bits" in (scan.unsupported_reason(
        of(scan.ScanInputs, u=m(1, n, 8), A=m(8, 16))) or ""), 2**27 - 1),
    "taps": (lambda n: conv._unsupported_reason(m(1, 4, 8), m(8, n)), conv.MAX_TAPS),
    "offsets": (lambda n: conv._unsupported_reason(m(1, 4, 8), m(8, 4), m(n)), 2, 1),
    "unit tensors": (
        lambda n: not conv.normalises((64,) * n, 64), conv.UNIT_TENSORS + 1, conv.UNIT_TENSORS),
    "rotated inputs": (lambda n: rotation._unsupported_reason(*angles(n)), rotation.INPUTS),
    "rotated channels": (lambda K: rotation._unsupported_reason(*angles(1, K)), rotation.WIDEST),
    "heads turned back": (
        lambda D: not rotated._fits(m(1, 4, 2, D), m(4, D // 2, dtype=FP32)), 128, 96),
    "features turned back": (
        lambda n: not rotated._fits(m(1, 4, 2, 64), m(4, n, dtype=FP32)), 32, 31),
    "angles' bytes": (lambda n: not rotated._fits(
        m(1, 4, 2, 64), m(4, 32, dtype=(FP32, BF16)[n])), 0),
    "rows turned back": (
        lambda n: not rotated._fits(m(n, 4, 2, 64), m(4, 32, dtype=FP32)), 1, 0),
    "shifted offsets": (lambda n: token_shift._unsupported_reason(m(1, 4, 8), m(n)), 2, 1),
    "step's K": (lambda K: decode.unsupported_reason(
        (terms(K), decode.Pool(m(1, 1, K, 64), None, False))), decode.MAX_K),
    "K": (lambda K: "at most" in (triton_plan.triton_unsupported_reason(terms(K)) or ""),
          inputs.MAX_HEAD_DIM),
    "a context's K": (
        lambda K: refuses(context._expect_narrow, terms(K), ""), inputs.MAX_HEAD_DIM),
    "tokens": (lambda T: "32 bits" in (sm90.sm90_unsupported_reason(terms(128, 128, T, 2)) or ""),
               2**29 - 1),
    "gated tokens": (lambda T: sm90._channel_gates_reason(gated(T=T)), 2**29 - 1),
    "strides of gates": (lambda n: inputs.contiguous(
        terms(g=m(1).expand(2).as_strided((2,), (n,)))).g.stride() != (n,), 2**31 - 1),
    "a block's taps": (lambda n: block_inputs.unsupported_reason(
        of(block_inputs.TokenInputs, x=m(1, 8), weight=m(8, n)), block_inputs.WIDTHS[0]),
        block_inputs.MAX_TAPS),
    "mixer's K": (lambda K: step._unsupported_reason(stepping(K)), step.MAX_K),
    "mixer's taps": (lambda n: step._unsupported_reason(stepping(taps=n)), step.MAX_TAPS),
    "drafts": (lambda T: not drafted(T), drafts.DRAFT_ROWS // 2 + 1),
    "projected rows": (
        lambda M: projection.unsupported_reason(projecting(M)), projection.MAX_ROWS),
    "normed rows": (lambda M: projection.unsupported_reason(
        projecting(M, norm_weight=m(8), norm=True)), 1),
    "long rows": (lambda M: projecting(M, 8, 64, residual=m(M, 8)).is_long, 1),
    "long columns": (lambda N: not projecting(2, N, 64, residual=m(2, N)).is_long, 31),
    "wgmma's rows": (lambda M: projecting(M, rows.WGMMA_COLUMNS).is_wide, rows.MMA_ROWS),
    "wgmma's columns": (
        lambda N: not projecting(64, N).is_wide, rows.WGMMA_COLUMNS, rows.WGMMA_COLUMNS - 1),
    "columns of wide tiles": (
        lambda N: projected.tile_of(16, N, 64, 2, 2, 1 << 17).BN != 32, 2048, 2047),
    "RWKV-7's K": (lambda K: rwkv7_step._unsupported_reason(
        of(rwkv7_step.StepInputs, r=m(1, K), r_k=m(1, K)), m(1, 1, K, K)), rwkv7_step.MAX_K),
    "RWKV-7's tiles": (lambda K: rwkv7._terms_tile(K) != rwkv7.TERMS_BACKWARD[64], 64),
    "attention's D": (
        lambda D: attention._too_wide(m(1, 1, 1, D), m(1, 1, 1, 8)), attention.MAX_HEAD_DIM),
    "float32's D": (lambda D: on_a_gpu(D, FP32), 128),
    "float32's D of sm_80": (lambda D: on_a_gpu(D, FP32, (8, 0)), 256),
    "attention's D of sm_90": (lambda D: on_a_gpu(D, BF16), 512),
    "attention's D of sm_75": (lambda D: on_a_gpu(D, torch.float16, (7, 5)), 256),
    "float8's capability": (
        lambda n: on_a_gpu(64, BF16, (8, n), torch.float8_e4m3fn), 9, 8),
    "tokens one by one": (lambda T: not by_token(T), linear.MAX_STEP_TOKENS),
    "also one by one": (lambda T: not also_by_token(T), linear.MAX_STEP_TOKENS),
    "programs of a scan": (lambda n: scanned(16 * 64, n) is None, segments.NUM_SMS // 4),
    "chunks of a scan": (
        lambda n: scanned(n * 64) is None, segments.MIN_CUT_CHUNKS, segments.MIN_CUT_CHUNKS - 1),
    "channels of more stages": (
        lambda BD: vector_decay.scan_stages(TILE, BD, 2, 1, True) != 3, 128),
    "programs of more stages": (
        lambda n: vector_decay.scan_stages(TILE, 64, 2, n, True) != 3, vector_decay.NUM_SMS // 8),
    "programs of all": (
        lambda n: not memory._fills_gpu(terms(HV=n)), memory.MIN_ACTIVE_PROGRAMS // 2,
        memory.MIN_ACTIVE_PROGRAMS // 2 - 1),
    "packed sequences": (lambda n: not fused_when_packed(n), 6, 5),
    "bytes of states": (lambda n: not in_two_kernels(n), bwd_schedule.SMALL_BYTES // 512),
    "equal blocks": (lambda n: not of_equal_blocks(n), 8 * 67, 4 * 67),
    "gates side by side": (copies_gates, 1),
    "a step's programs": (shares, 128, 256),
    "exact scans": (scan_is_exact, 128),
    "shared norms": (lambda D: not makes_norms(D), projections.MAX_SHARED_SIZE),
    "heads of a cache": (lambda D: not writes_in_kernel(D), 128),
    "gradients' K": (lambda K: not supports_dqkg(gated(K), X), 128, 256),
    "gradients' tokens": (lambda T: not supports_dqkg(gated(T=T), X), 2**29 - 1),
    "cached rows": (lambda n: loss._tile(n, 2) != loss.CACHED_TILE, loss.CACHED_ROW // 2),
    "classes": (lambda V: loss._tile(V, 2)[0] != 1024, 1024),
    "products one by one": (lambda k: "multiply-adds" in (config.violation(config.MatmulConfig(
        64, 128, k, 4, 2, kernel="pointer"), IEEE, ARCHS["sm_90"]) or ""), 128, 256),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (backends, attention):
        monkeypatch.setattr(place, "triton_unsupported", lambda *_: None)
    for place in (backends, drafts):
        monkeypatch.setattr(place, "sm90_unsupported", lambda *_: None)
    monkeypatch.setattr(guarded_launch, "known_failure", lambda *_: None)
    monkeypatch.setattr(serving.token_ids, "expect_below", lambda *_: None)


@pytest.mark.parametrize("name", LIMITS)
def test_calls_are_taken_up_to_their_limit(name: str) -> None:
    reason, taken, *refused = LIMITS[name]
    assert not reason(taken)
    assert reason(refused[0] if refused else taken + 1)


class OnAGpu(torch.Tensor):
    device: Any = SimpleNamespace(type="cuda")


def appended(rows: Tensor) -> list[bool]:
    k, new = torch.zeros(2, 1, 1, 1), torch.ones(4, 1, 1, 1)
    cache.append(k, k.clone(), new, new, torch.zeros(4, dtype=torch.int32), rows, None)
    return [False, *k.flatten().bool().tolist(), False]


def read(rows: Tensor) -> list[bool]:
    k = torch.ones(2, 3, 1, 1)
    lengths = cache.gather(of(cache.Cache, q=torch.ones(4, 1, 1, 1), k=k, v=k, rows=rows)).lengths
    assert lengths is not None
    return lengths.bool().tolist()


# which of the rows -1, 0, 1 and 2 there are of two
ROWS: dict[str, Callable[[Tensor], Any]] = {
    "pages": lambda x: (~cache.missing_pages(x, 2)).tolist(),
    "rows of a cache that is written": appended,
    "rows of a cache that is read": read,
    "states to copy": lambda x: copy_states._is_valid(m(2, 3), x).tolist(),
    "slots of a pool": lambda x: (serving.slots_of(m(2), x.as_subclass(OnAGpu)) >= 0).tolist(),
    "columns of a rank": lambda x: of(
        shard.RankRows, target=x + 2, shard=shard.Shard(2, 2, 9, None),
        options=SimpleNamespace(ignore_index=-100)).columns[1].tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_from_zero_to_their_number(name: str) -> None:
    assert ROWS[name](torch.tensor([-1, 0, 1, 2])) == [False, True, True, False]


def test_windows_of_one_key_are_windows() -> None:
    rule = masks.Rule(left=0)
    assert rule.positioned and masks.Rule(right=0).positioned and not masks.Rule().positioned
    both = (masks.Pattern(rule) & masks.Pattern(masks.Rule(left=3))).rule
    assert both.left == 0 and both.right < 0


def test_tile_of_a_projection_has_16_columns_or_more() -> None:
    assert [projected.tile_of(16, 16, 64, 2, 2, n).BK for n in (0, 1 << 17)] == [16, 64]


@pytest.mark.parametrize(("stride", "columns"), [(4, 4), (5, 4), (8, 4), (8, 6)])
def test_rows_are_copied_whatever_their_strides(stride: int, columns: int) -> None:
    """By words of 8 bytes where all rows begin at one and end with one."""
    x, y = torch.zeros(2, 4, stride, dtype=BF16), torch.randn(2, 4, stride).to(BF16)
    rotary._copy(x[..., :columns], y[..., :columns])
    assert torch.equal(x[..., :columns], y[..., :columns])

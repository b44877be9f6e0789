"""Operators under fla's names: the same numbers as slipstream.ops, by position and by keyword;
small functions of fla.ops, beside formulas written out in torch."""

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slipstream.compat.fla
from slipstream import ops
from slipstream.compat.fla import functions
from slipstream.compat.fla.adaptor import HINTS, REFUSED, Operator
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.ops import utils as indices
from tests.support.fla_inputs import B, H, K, T, inputs, member

OFFSETS = torch.tensor([0, 5, T])


def _expected(row: Operator, given: dict[str, Any]) -> Any:
    """The results of slipstream.ops with fla's defaults."""
    if row.name == "fused_mul_recurrent_rwkv7":
        given = dict(given)
        kk, a = given.pop("kk"), given.pop("a")
        return ops.fused_recurrent_rwkv7(**given, a=-kk, b=kk * a)
    if row.function in (ops.chunk_gsa, ops.fused_recurrent_gsa):
        s, g, _ = functions.fused_additive_gate(given["s"], None, given.get("cu_seqlens"))
        given = given | {"s": s, "g": g}
    if row.name == "fused_recurrent_rwkv7":
        given = {"scale": None, "output_final_state": True} | given
    return row.function(**{row.renamed.get(n, n): x for n, x in given.items()})


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_by_position_equals_slipstream(row: Operator) -> None:
    given, function = inputs(row), member(row)
    names = [
        n for n, p in inspect.signature(function).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    options = {"scale": 0.7} if "scale" in names else {}
    options |= {"output_final_state": True} if "output_final_state" in names else {}
    values = {**given, **options}
    signature = inspect.signature(function)
    last = max(names.index(n) for n in values)
    args = [values.get(n, signature.parameters[n].default) for n in names[: last + 1]]
    got, want = function(*args), _expected(row, values)
    torch.testing.assert_close(_output(got), _output(want), rtol=0, atol=0)
    if "output_final_state" in names:
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_packed_with_hints_equals_slipstream(row: Operator) -> None:
    given, function = inputs(row), member(row)
    names = set(inspect.signature(function).parameters)
    if "cu_seqlens" not in names:
        assert row.name in ("chunk_abc", "chunk_hgrn")  # fla has no packed form of them
        return
    hints = {"cu_seqlens_cpu": OFFSETS, "chunk_indices": OFFSETS, "disable_recompute": True}
    hints |= {"checkpoint_level": 1, "use_graph": True, "max_num_seqs": 2}
    assert set(hints) == HINTS
    off = {n: REFUSED[n] for n in names & set(REFUSED)}
    got = function(**given, cu_seqlens=OFFSETS, head_first=False, **hints, **off)
    want = _expected(row, given | {"cu_seqlens": OFFSETS})
    torch.testing.assert_close(_output(got), _output(want), rtol=0, atol=0)


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_unsupported_arguments_are_refused(row: Operator) -> None:
    given, function = inputs(row), member(row)
    with pytest.raises(TypeError, match=rf"{row.name}\(\) got an unexpected .* 'nonsense'"):
        function(**given, nonsense=1)
    with pytest.raises(NotImplementedError, match="head_first: transpose the inputs"):
        function(**given, head_first=True)
    for name in REFUSED:
        if name in inspect.signature(function).parameters:
            with pytest.raises(NotImplementedError, match=f"{name}: Slipstream's {row.name}"):
                function(**given, **{name: object()})


def test_intermediate_states_are_refused() -> None:
    from slipstream.compat.fla.ops.kda import chunk_kda

    given = inputs(next(row for row in OPERATORS if row.name == "chunk_kda"))
    with pytest.raises(NotImplementedError, match="return_intermediate_states: Slipstream's"):
        chunk_kda(**given, return_intermediate_states=True)


def test_transpose_state_layout_is_state_v_first() -> None:
    from slipstream.compat.fla.ops.kda import chunk_kda

    row = next(row for row in OPERATORS if row.name == "chunk_kda")
    given = inputs(row) | {"output_final_state": True}
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is deprecated"):
        _, state = chunk_kda(**given, transpose_state_layout=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, want = chunk_kda(**given, state_v_first=True)
    torch.testing.assert_close(state, want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="transpose_state_layout: want one of it"):
        chunk_kda(**given, transpose_state_layout=True, state_v_first=True)


def test_wrong_positional_arguments() -> None:
    from slipstream.compat.fla.ops.retention import parallel_retention

    x = torch.rand(B, T, H, K)
    with pytest.raises(TypeError, match="takes 6 positional arguments but 7 were given"):
        parallel_retention(x, x, x, 1.0, False, None, None)
    with pytest.raises(TypeError, match="got multiple values for argument 'k'"):
        parallel_retention(x, x, k=x)


def test_keywords_behind_fla_kwargs_reach_the_operator() -> None:
    from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

    row = next(row for row in OPERATORS if row.name == "chunk_gated_delta_rule")
    given = inputs(row)
    gate = {"use_gate_in_kernel": True, "A_log": torch.rand(H), "dt_bias": torch.rand(H)}
    got, _ = chunk_gated_delta_rule(**given, **gate, chunk_size=32)
    want, _ = ops.chunk_gated_delta_rule(**given, **gate, chunk_size=32)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_slots_without_a_gate_are_means_of_each_sequence() -> None:
    from slipstream.compat.fla.ops.gsa import chunk_gsa, fused_recurrent_gsa

    q, k, v, s = (torch.randn(B, T, H, K) for _ in range(4))
    state = [torch.randn(2, H, K, K) for _ in range(2)]
    packed, _ = chunk_gsa(q, k, v, s, cu_seqlens=OFFSETS)
    for part in (slice(0, 5), slice(5, T)):
        alone, _ = ops.chunk_gsa(*(x[:, part] for x in (q, k, v, s)))
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-5, atol=1e-5)
    got, _ = fused_recurrent_gsa(q, k, v, s, initial_state=state, cu_seqlens=OFFSETS)
    z = s[:, :5].logcumsumexp(1)  # of the first sequence: its state is not forgotten at first
    g = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]], 1)
    want, _ = ops.chunk_gsa(
        *(x[:, :5] for x in (q, k, v)),
        (s[:, :5] - z).exp(),
        g,
        initial_state=(state[0][:1], state[1][:1]),
    )
    torch.testing.assert_close(got[:, :5], want, rtol=1e-5, atol=1e-5)


def test_linear_attention_takes_a_state_without_its_sum() -> None:
    from slipstream.compat.fla.ops.linear_attn import chunk_linear_attn

    q, k, v = (torch.rand(B, T, H, K) for _ in range(3))
    kv = torch.rand(B, H, K, K)
    got, _ = chunk_linear_attn(q, k, v, 1.0, kv)
    want, _ = ops.chunk_linear_attn(q, k, v, scale=1.0, initial_state=(kv, torch.zeros(B, 1, H, K)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_attn_decoding_one_step(window: int | None, scaled: bool) -> None:
    lengths = [4, 0, 7]
    offsets = torch.tensor([0, 4, 4, 11])
    q = torch.randn(1, 3, 4, K)
    k, v = torch.randn(2, 1, 11, 2, K)
    g, sinks = -torch.rand(1, 11, 4), torch.randn(4)
    got = functions.attn_decoding_one_step(
        q, k, v, g, None, offsets, scaled, window_size=window, sink_bias=sinks
    )
    scale = K**-0.5
    for n, length in enumerate(lengths):
        part = slice(offsets[n], offsets[n + 1])
        if not length or window == 0:
            assert not got[0, n].any()
            continue
        keys, values = (x[0, part].repeat_interleave(2, 1) for x in (k, v))
        gate = g[0, part].cumsum(0) * (scale if scaled else 1.0)
        scores = torch.einsum("hk,shk->hs", q[0, n], keys) * scale + (gate[-1] - gate).mT
        if window is not None:
            scores[:, : max(length - window, 0)] = float("-inf")
        weights = torch.cat([scores, sinks[:, None]], -1).softmax(-1)[:, :-1]
        want = torch.einsum("hs,shk->hk", weights, values)
        torch.testing.assert_close(got[0, n], want, rtol=1e-5, atol=1e-5)


def test_package_imports_as_it_is() -> None:
    from slipstream.compat.fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule

    from slipstream.compat.fla.ops import chunk_gdn

    assert chunk_gdn.__doc__ and "slipstream.ops.chunk_gated_delta_rule" in chunk_gdn.__doc__
    assert chunk_gated_delta_rule.__module__ == "slipstream.compat.fla.ops.gated_delta_rule.chunk"
    assert slipstream.compat.fla.ops.chunk_gdn is chunk_gdn


CU_SEQLENS = torch.tensor([0, 3, 3, 8, 12])
LENGTHS = [3, 0, 5, 4]


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# indices of packed sequences


def test_lengths_and_offsets() -> None:
    assert indices.prepare_lens(CU_SEQLENS).tolist() == LENGTHS
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]])
    assert indices.prepare_lens_from_mask(mask).tolist() == [2, 3, 0]
    offsets = indices.prepare_cu_seqlens_from_mask(mask)
    assert offsets.tolist() == [0, 2, 5, 5] and offsets.dtype == torch.int32
    long = indices.prepare_cu_seqlens_from_lens(torch.tensor(LENGTHS), torch.int64)
    assert torch.equal(long, CU_SEQLENS)


def test_split_offsets() -> None:
    split = indices.prepare_split_cu_seqlens
    assert split(cu_seqlens=CU_SEQLENS, split_size=2).tolist() == [0, 2, 3, 5, 7, 8, 10, 12]
    assert split(2, 5, 3).tolist() == [0, 3, 5, 8, 10]
    with pytest.raises(TypeError, match="split_size: want"):
        split(2, 5)
    with pytest.raises(TypeError, match="cu_seqlens: want offsets, or"):
        split(split_size=3)


@pytest.mark.parametrize("on_host", [None, CU_SEQLENS.clone()])
def test_positions_and_chunks(on_host: Tensor | None) -> None:
    positions = indices.prepare_position_ids(CU_SEQLENS, on_host)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    sequences = [0] * 3 + [1] * 5 + [2] * 4  # fla counts no empty sequence here
    assert indices.prepare_sequence_ids(CU_SEQLENS, on_host).tolist() == sequences
    tokens = indices.prepare_token_indices(CU_SEQLENS, on_host)
    assert tokens.tolist() == [list(x) for x in zip(sequences, positions.tolist())]
    chunks = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1]]
    assert indices.prepare_chunk_indices(CU_SEQLENS, 2, on_host).tolist() == chunks
    assert indices.prepare_chunk_offsets(CU_SEQLENS, 2).tolist() == [0, 2, 2, 5, 7]
    assert indices.get_max_num_splits(CU_SEQLENS, 2, on_host) == 3
    static, offsets = indices.prepare_chunk_indices_static(CU_SEQLENS, 2, 9)
    assert static.tolist() == [*chunks, [-1, 0], [-1, 0]]
    assert offsets.tolist() == [0, 2, 2, 5, 7]


# functions of fla.ops


def test_gates() -> None:
    g, A_log, bias = torch.randn(2, 4, 3, 5), torch.randn(3), torch.randn(15)
    x = g + bias.view(3, 5)
    rate = A_log.exp()[:, None]
    close(functions.fused_kda_gate(g, A_log, bias), -rate * F.softplus(x))
    close(functions.fused_kda_gate(g, A_log, bias, -5.0), -5 * torch.sigmoid(rate * x))
    close(functions.fused_kda_gate(g, None, bias, -5.0), -5 * torch.sigmoid(x))
    with pytest.raises(ValueError, match="A_log: want a tensor"):
        functions.fused_kda_gate(g)
    got = functions.fused_gdn_gate(g[..., 0], A_log, bias[:3], torch.float64)
    assert got.dtype == torch.float64
    close(got, (-A_log.exp() * F.softplus(g[..., 0] + bias[:3])).double())
    close(functions.fused_beta_sigmoid(g, 2.0), 2 * g.sigmoid())


def test_additive_gate_carries_its_state() -> None:
    x = torch.randn(2, 9, 3, 4, dtype=torch.float64)
    k, g, z = functions.fused_additive_gate(x)
    close(k, (x - x.logcumsumexp(1)).exp())
    close(z[:, 0], x.logsumexp(1).float())
    assert not g[:, 0].any()
    first = functions.fused_additive_gate(x[:, :4])
    second = functions.fused_additive_gate(x[:, 4:], first[2])
    close(torch.cat([first[0], second[0]], 1), k)
    close(torch.cat([first[1], second[1]], 1), g)
    packed = functions.fused_additive_gate(
        x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 9, 9, 18])
    )
    close(packed[0].view_as(k), k)
    assert packed[2][1].eq(float("-inf")).all()


def test_rwkv4_in_two_calls_by_its_own_recurrence() -> None:
    B, T, D = 2, 9, 4
    w, u = torch.randn(2, D)
    k, v = 3 * torch.randn(2, B, T, D)
    a, b, e = torch.zeros(B, D), torch.zeros(B, D), torch.full((B, D), -1e38)
    state, want = torch.stack([a, b, e], 1)[:, :, None], []
    for t in range(T):
        top = torch.maximum(u + k[:, t], e)
        old, new = (e - top).exp(), (u + k[:, t] - top).exp()
        want.append((old * a + new * v[:, t]) / (old * b + new))
        top = torch.maximum(e - w.exp(), k[:, t])
        old, new = (e - w.exp() - top).exp(), (k[:, t] - top).exp()
        a, b, e = old * a + new * v[:, t], old * b + new, top
    first, state = functions.fused_recurrent_rwkv4(w, u, k[:, :4], v[:, :4], state)
    second, state = functions.fused_recurrent_rwkv4(w, u, k[:, 4:], v[:, 4:], state)
    close(torch.cat([first, second], 1), torch.stack(want, 1))
    close(state[:, 0, 0] / state[:, 1, 0], a / b)
    close(state[:, 2, 0] + state[:, 1, 0].log(), e + b.log())


def test_attnres_weights() -> None:
    query, weight = torch.randn(6), torch.rand(6)
    streams = [torch.randn(2, 3, 6) for _ in range(4)]
    o, p = functions.fused_attnres(query[:, None], streams, weight, None, 1e-6, 0.5, True)
    stacked = torch.stack(streams)
    keys = F.rms_norm(stacked, (6,), weight, 1e-6)
    close(p, (0.5 * keys @ query).softmax(0))
    close(o, (p[..., None] * stacked).sum(0))
    with pytest.raises(ValueError, match="residuals: want at least one"):
        functions.fused_attnres(query, [], weight)


def test_elementwise_functions_of_rwkv7() -> None:
    x, delta, k, a = torch.randn(4, 2, 5, 6)
    each = torch.randn(6, 6)
    got = functions.fused_addcmul_rwkv7(x, delta, *each)
    close(list(got), [x + delta * m for m in each])
    assert functions.fused_addcmul_rwkv7(x, delta, *each[:5])[5] is None
    close(functions.fused_k_rwkv7(k, a, each[0]), k * (1 + (a - 1) * each[0]))
    r, v = k.view(2, 5, 3, 2), x.view(2, 5, 3, 2)
    r_k = torch.randn(3, 2)
    want = (x + ((r * r * r_k).sum(-1, keepdim=True) * v).flatten(2)) * a
    close(functions.gate_output_correction(x, r, r, r_k, v, a), want)
    key, value, before = torch.randn(6, 8), torch.randn(8, 6), torch.randn(2, 6)
    shifted = torch.cat([before[:, None], x[:, :-1]], 1)
    y, last = functions.channel_mixing_rwkv7(x, before, each[0], key, value)
    close(y, F.relu((x + (shifted - x) * each[0]) @ key) ** 2 @ value, 1e-4)
    assert torch.equal(last, x[-1])

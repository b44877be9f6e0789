"""Operators under fla's names: the same numbers as slipstream.ops, by position and by keyword."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream.compat.fla
from slipstream import ops
from slipstream.compat.fla import functions
from slipstream.compat.fla.adaptor import HINTS, REFUSED, Operator
from slipstream.compat.fla.operators import OPERATORS
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

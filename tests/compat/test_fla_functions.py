"""fla.ops.utils and small functions of fla.ops, beside formulas written out in torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.fla import functions
from slipstream.compat.fla.ops import utils as indices

OFFSETS = torch.tensor([0, 3, 3, 8, 12])
LENGTHS = [3, 0, 5, 4]


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# indices of packed sequences


def test_lengths_and_offsets() -> None:
    assert indices.prepare_lens(OFFSETS).tolist() == LENGTHS
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]])
    assert indices.prepare_lens_from_mask(mask).tolist() == [2, 3, 0]
    offsets = indices.prepare_cu_seqlens_from_mask(mask)
    assert offsets.tolist() == [0, 2, 5, 5] and offsets.dtype == torch.int32
    long = indices.prepare_cu_seqlens_from_lens(torch.tensor(LENGTHS), torch.int64)
    assert torch.equal(long, OFFSETS)


def test_split_offsets() -> None:
    split = indices.prepare_split_cu_seqlens
    assert split(cu_seqlens=OFFSETS, split_size=2).tolist() == [0, 2, 3, 5, 7, 8, 10, 12]
    assert split(2, 5, 3).tolist() == [0, 3, 5, 8, 10]
    with pytest.raises(TypeError, match="split_size: want"):
        split(2, 5)
    with pytest.raises(TypeError, match="cu_seqlens: want offsets, or"):
        split(split_size=3)


@pytest.mark.parametrize("on_host", [None, OFFSETS.clone()])
def test_positions_and_chunks(on_host: Tensor | None) -> None:
    positions = indices.prepare_position_ids(OFFSETS, on_host)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    sequences = [0] * 3 + [1] * 5 + [2] * 4  # fla counts no empty sequence here
    assert indices.prepare_sequence_ids(OFFSETS, on_host).tolist() == sequences
    tokens = indices.prepare_token_indices(OFFSETS, on_host)
    assert tokens.tolist() == [list(x) for x in zip(sequences, positions.tolist())]
    chunks = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1]]
    assert indices.prepare_chunk_indices(OFFSETS, 2, on_host).tolist() == chunks
    assert indices.prepare_chunk_offsets(OFFSETS, 2).tolist() == [0, 2, 2, 5, 7]
    assert indices.get_max_num_splits(OFFSETS, 2, on_host) == 3
    static, offsets = indices.prepare_chunk_indices_static(OFFSETS, 2, 9)
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

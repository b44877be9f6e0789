"""The deterministic mode: the same bits on 1, 2 and 4 ranks, forward and gradients."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.context import softmax_by_heads
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.gated_scan import op as gated_scan
from slipstream.kernels.linear import context
from slipstream.kernels.linear.context import linear_across_ranks
from slipstream.kernels.linear.context_terms import Call
from slipstream.kernels.linear.inputs import TOKEN_TERMS, ForwardCall, LinearInputs
from slipstream.kernels.linear.modes.memory import Groups
from slipstream.kernels.selective_scan import op as selective
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.runtime.context_parallel import Share
from tests.support.by_shape import RoundedByShape
from tests.support.linear_interpreted import context_terms, reference
from tests.support.lockstep import linear_on_ranks, run_ranks
from tests.support.operators import relative_error

SEGMENT = 32
# tokens of ranks: cuts are multiples of SEGMENT after a sequence's beginning
ROWS = {1: (192,), 2: (96, 96), 4: (32, 64, 0, 96)}
SEQUENCES = (50, 0, 110, 32)
PACKED = {1: (192,), 2: (82, 110), 4: (32, 50, 32, 78)}


def make(kind: str, packed: bool, dtype: torch.dtype) -> LinearInputs:
    torch.manual_seed(0)
    return context_terms(kind, 192, SEQUENCES if packed else None, dtype=dtype)


KINDS = ("retention", "simple_gla", "gla", "gla of values", "rwkv6", "gated delta", "kda", "dplr")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(which=lambda kind, packed: packed or kind in ("simple_gla", "kda"))
def test_linear_bits_do_not_depend_on_the_ranks(kind: str, packed: bool) -> None:
    terms = make(kind, packed, torch.float32)
    do, dfinal = torch.randn(terms.v.shape), torch.randn(terms.state_shape)
    cuts, found = PACKED if packed else ROWS, {}
    for ranks, lengths in cuts.items():
        options: dict[str, Any] = {"scale": 0.25, "impl": "eager", "within": RoundedByShape}
        given = terms, do, dfinal, lengths
        found[ranks] = linear_on_ranks(*given, **options, segment_tokens=SEGMENT)
    for name, x in reference(terms, 0.25, do, dfinal).items():
        assert relative_error(found[1][name], x) < 1e-5, name
        for ranks in (2, 4):
            if name == "u":  # a parameter's gradient is a sum over ranks
                torch.testing.assert_close(found[ranks][name], found[1][name])
            else:
                assert torch.equal(found[ranks][name], found[1][name]), (name, ranks)


@pytest.mark.parametrize("segment", [None, SEGMENT])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["kda", "dplr", "rwkv6"])
def test_groups_of_heads_equal_all_at_once(kind: str, packed: bool, segment: int | None) -> None:
    """A forward pass without gradients; each group has an exchange of its own."""
    terms = make(kind, packed, torch.float64)
    heads = {"u": 0, "initial_state": 1} | dict.fromkeys(TOKEN_TERMS, 2)
    given = {n: getattr(terms, n) for n in heads}
    many = {n: torch.cat([x.double()] * 3, heads[n]) for n, x in given.items() if x is not None}
    terms = terms._replace(**many)
    terms = terms._replace(v=torch.randn_like(terms.v))
    offsets = None if terms.cu_seqlens is None else terms.cu_seqlens.tolist()

    def on(share: Share) -> list[Tensor]:
        mine = terms.of_tokens(lambda x: x[:, share.begin : share.end])
        cu = torch.tensor(share.local_offsets, dtype=torch.int32) if share.packed else None
        mine = mine._replace(initial_state=None, cu_seqlens=cu)
        call = Call(ForwardCall(0.25, 32, "eager"), lambda _: "eager", True)
        o, final = linear_across_ranks(mine, terms.initial_state, share, call)
        assert final is not None
        return [o, final]

    def whole(groups: Groups | None) -> list[Tensor]:
        with mock.patch.object(context, "groups_of", return_value=groups):
            ranks = run_ranks(on, (PACKED if packed else ROWS)[4], offsets, segment)
        return [torch.cat([x for x, _ in ranks], 1), ranks[0][1]]

    wanted = whole(None)
    for groups in (Groups(1, 2), *([] if packed else [Groups(2, 1), Groups(2, 3)])):
        torch.testing.assert_close(whole(groups), wanted, rtol=1e-12, atol=1e-12)


def test_products_are_rounded_by_how_many_there_are() -> None:
    """In the tests of bits, as libraries may do on a GPU."""
    x, y = torch.randn(4, 8, 16), torch.randn(4, 16, 8)
    with RoundedByShape():
        assert torch.equal(x[:2] @ y[:2], x[:2].clone() @ y[:2].clone())
        assert not torch.equal((x @ y)[:2], x[:2] @ y[:2])


def test_cut_within_a_segment() -> None:
    terms = make("retention", True, torch.float32)
    do = torch.randn(terms.v.shape)
    with pytest.raises(ValueError, match="segment_tokens: rank 1 begins 10 tokens after"):
        linear_on_ranks(terms, do, None, (60, 132), scale=1.0, impl="eager", segment_tokens=SEGMENT)


@pytest.mark.parametrize("lengths", [(96, 96), (32, 50, 32, 78)], ids=["2", "4"])
def test_attention_bits_do_not_depend_on_the_ranks(lengths: tuple[int, ...]) -> None:
    """One head of keys at a time, in calls of the same shapes."""
    cu = torch.tensor([0, *SEQUENCES]).cumsum(0).int()
    tensors = [torch.randn(1, 192, n, 16) for n in (8, 4, 4)]
    do = torch.randn(tensors[0].shape)
    options = AttentionOptions(0.25, -1, 0)

    def on(share: Share) -> list[Tensor]:
        at = slice(share.begin, share.end)
        mine = [x[:, at].clone().requires_grad_() for x in tensors]
        inputs = AttentionInputs(*mine, cu_q=cu, cu_k=cu)
        o, _ = softmax_by_heads(inputs, options, "eager", share, False)
        return [o.detach(), *torch.autograd.grad(o, mine, do[:, at])]

    def whole(lengths: tuple[int, ...]) -> list[Tensor]:
        ranks = run_ranks(on, lengths, cu.tolist(), SEGMENT, RoundedByShape)
        return [torch.cat(each, 1) for each in zip(*ranks)]

    torch.testing.assert_close(whole(lengths), whole((192,)), rtol=0, atol=0)


def test_attention_of_inputs_that_lie_otherwise() -> None:
    """Heads before tokens, rows that begin at no whole word, and views of the other sign."""
    q, k, v = (torch.randn(2, 96, 4, 16) for _ in range(3))
    options = AttentionOptions(0.25, -1, 0)
    rows = torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k)
    lying = [q.transpose(1, 2).contiguous().transpose(1, 2), rows, torch._neg_view(-v)]

    def on(tensors: list[Tensor]) -> list[Tensor]:
        def call(share: Share) -> list[Tensor]:
            at = slice(share.begin, share.end)
            mine = [x[:, at].detach().requires_grad_() for x in tensors]
            o, _ = softmax_by_heads(AttentionInputs(*mine), options, "eager", share, False)
            return [o.detach(), *torch.autograd.grad(o, mine, v[:, at])]

        return [torch.cat(each, 1) for each in zip(*run_ranks(call, (40, 56), None))]

    torch.testing.assert_close(on(lying), on([q, k, v]), rtol=0, atol=0)


def hgrn(tensors: list[Tensor], states: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    x, g = tensors
    return gated_scan._scan_of_rank(x, -g.abs(), None, states, share, "eager")


def selective_scan(tensors: list[Tensor], states: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    u, delta = tensors
    A = -torch.linspace(0.1, 1.0, 8).view(1, 8).expand(6, 8)
    B, C = (torch.cat([x[:, :, :4]] * 2, 2).unsqueeze(2) for x in tensors)
    inputs = ScanInputs(u, delta, A, B, C, None, delta, None, None, None)
    return selective._scan_of_rank(inputs, states, share, True, "eager")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("scan", [hgrn, selective_scan])
def test_bits_of_scans_do_not_depend_on_the_ranks(scan: Callable[..., Any], packed: bool) -> None:
    N = len(SEQUENCES) if packed else 2
    tensors = [torch.randn(1 if packed else 2, 192, 6) for _ in range(2)]
    states = torch.randn(N, 6) if scan is hgrn else torch.randn(N, 6, 8)
    dy, dfinal = torch.randn(tensors[0].shape), torch.randn(states.shape)
    offsets = torch.tensor([0, *SEQUENCES]).cumsum(0).tolist() if packed else None

    def on(share: Share) -> list[Tensor]:
        at = slice(share.begin, share.end)
        mine = [x[:, at].clone().requires_grad_() for x in tensors]
        given = states.clone().requires_grad_()
        y, after = scan(mine, given, share)
        final = share.whole_states(after, given, 1 if packed else 2)
        mine_of_final = dfinal if share.rank == 0 else torch.zeros_like(dfinal)
        grads = torch.autograd.grad([y, final], [*mine, given], [dy[:, at], mine_of_final])
        return [y.detach(), *grads[:2], final.detach()[None], grads[2][None]]

    found = {}
    for ranks, lengths in (PACKED if packed else ROWS).items():
        *each, final, dstates = zip(*run_ranks(on, lengths, offsets, SEGMENT, RoundedByShape))
        assert all(torch.equal(x, final[0]) for x in final)
        # of each state one rank has the gradient
        found[ranks] = [*(torch.cat(x, 1) for x in each), final[0], torch.cat(dstates).sum(0)]
    for ranks in (2, 4):
        torch.testing.assert_close(found[ranks], found[1], rtol=0, atol=0)

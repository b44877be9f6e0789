"""The properties of the linear family's terms, kernels/linear/inputs.py:Term; gates of channels, as
free a and b where no kernel takes them; the matrices by which kernels sum gates."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import plan, probe
from slipstream.kernels.linear.channel_gates import as_dplr
from slipstream.kernels.linear.dispatch import LinearOptions, check
from slipstream.kernels.linear.inputs import (
    TERMS,
    TOKEN_TERMS,
    BackwardCall,
    LinearInputs,
    not_taken,
)
from slipstream.kernels.linear.op import backward_impl, by_name, forward_impl
from slipstream.kernels.linear.plan import HAVE_TRITON
from slipstream.kernels.linear.reference import linear_reference
from tests.support import wants

if HAVE_TRITON:
    from slipstream.kernels.linear.triton.common import gate_ones

SIZES = {"B": 2, "T": 3, "H": 2, "HV": 4, "K": 5, "V": 6, "N": 2}


def everything(wide: bool = False) -> LinearInputs:
    """All terms at once, which no operator has, each in one of its forms."""
    forms = {name: (wide and term.wide) or term.dims for name, term in TERMS.items()}
    shapes = {name: [SIZES[d] for d in form.split()] for name, form in forms.items()}
    return LinearInputs(**{name: torch.rand(shape) for name, shape in shapes.items()})


def test_all_terms_but_offsets_are_declared() -> None:
    assert (*TERMS, "cu_seqlens") == LinearInputs._fields
    assert everything().sizes == SIZES


@pytest.mark.parametrize("wide", [False, True])
def test_declared_shapes_pass_the_check(wide: bool) -> None:
    check(everything(wide), {}, LinearOptions(), recurrent=True)


@pytest.mark.parametrize("name", TERMS)
def test_other_shapes_are_refused_by_name(name: str) -> None:
    terms = everything()
    x = getattr(terms, name)
    wrong = [x[..., None]]
    if name not in ("q", "v"):  # by which the others are measured
        wrong += [torch.cat([x, x], dim) for dim in range(x.dim())]
    for y in wrong:
        changed = terms._replace(**{name: y})
        with pytest.raises(ValueError, match=r"^user's: want"):
            check(changed, {name: "user's"}, LinearOptions(), recurrent=True)


def test_columns_of_beta_are_for_the_recurrent_path() -> None:
    with pytest.raises(ValueError, match=r"^beta: want shape"):
        check(everything(wide=True), {}, LinearOptions(), recurrent=False)


def test_of_tokens_changes_rows_of_tokens() -> None:
    terms = everything()
    cut = terms.of_tokens(lambda x: x[:, :1])
    for name in TERMS:
        x, y = getattr(terms, name), getattr(cut, name)
        assert y.shape == x[:, :1].shape if name in TOKEN_TERMS else y is x


@pytest.mark.parametrize("wide", [False, True])
def test_probe_has_every_term(wide: bool) -> None:
    tiny = probe.like(everything(wide), tokens=7)
    want = {**SIZES, "B": 1, "T": 7, "N": 1}
    for name, term in TERMS.items():
        x: Tensor = getattr(tiny, name)
        assert tuple(x.shape) == tuple(want[d] for d in term.dims_of(x.dim()))


def test_kernels_name_the_terms_they_take() -> None:
    taken = [plan.TERMS_TAKEN, plan.TRANSITION_TERMS]
    taken += [plan.SCALAR_DECAY_TERMS, plan.VECTOR_DECAY_TERMS]
    for names in taken:
        assert set(names) <= set(LinearInputs._fields)
    assert not_taken(everything(), plan.TERMS_TAKEN) is None
    assert not_taken(everything(), plan.TRANSITION_TERMS) == "it takes no gv"


NAMES = ("q", "k", "v", "g", "erase", "write")


def inputs(dtype: torch.dtype = torch.float64, K: int = 16) -> LinearInputs:
    B, T, H, HV, V = 2, 20, 1, 2, 32
    torch.manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(B, T, *shape).to(dtype)

    q, k = (torch.nn.functional.normalize(rand(H, K) - 0.5, dim=-1) for _ in "qk")
    return LinearInputs(
        q, k, rand(HV, V) - 0.5, g=-rand(HV, K), erase=2 * rand(HV, K), write=rand(HV, V)
    )


def test_other_back_ends_give_the_same() -> None:
    """Forward and backward where the kernels for sm_90 have failed, and terms turned into
    a and b beforehand."""
    terms = inputs()
    leaves = [getattr(terms, n).clone().requires_grad_() for n in NAMES]
    o, state = linear_reference(LinearInputs(**dict(zip(NAMES, leaves))), 0.3)
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    want = torch.autograd.grad((o, state), leaves, (do, dstate))
    for got, right in zip(forward_impl(*terms, 0.3, 16, "eager", False), (o, state)):
        torch.testing.assert_close(got, right.detach())
    call = BackwardCall(do, dstate, 0.3, 16, "eager")
    got = by_name(terms, True, backward_impl(*terms, *call))
    for name, right in zip(NAMES, want, strict=True):
        torch.testing.assert_close(got[name], right)
    for got, right in zip(linear_reference(as_dplr(terms), 0.3), (o, state)):
        torch.testing.assert_close(got, right.detach())


@pytest.mark.parametrize("name", ["erase", "write", "g", "K"])
def test_sm90_refuses_other_gates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is begun: gradients are left to no other kernel."""
    monkeypatch.setattr(plan.backends, "sm90_unsupported", lambda x: None)
    monkeypatch.setattr(plan.guarded_launch, "known_failure", lambda make, device: None)
    terms = inputs(torch.bfloat16, K=64)
    terms = terms._replace(v=terms.v.repeat(1, 1, 1, 2), write=terms.write.repeat(1, 1, 1, 2))
    assert plan.sm90_unsupported_reason(terms) is None
    if name == "K":
        terms = inputs(torch.bfloat16, K=48)
    else:
        terms = terms._replace(**{name: getattr(terms, name).double()})
    assert plan.sm90_unsupported_reason(terms) is not None


C = 32


@wants.triton
def test_ones_sum_gates_up_to_an_edge() -> None:
    g = torch.arange(1.0, C + 1)
    edges = [lambda t: 0, lambda t: t >> 4 << 4]
    edges += [lambda t, n=n: (t >> (n + 1) << (n + 1)) + (1 << n) for n in range(5)]
    ones = gate_ones.gate_ones(torch.device("cpu"), C, torch.float32)
    assert ones.shape == (len(edges), 3, C, C)
    for of_edge, edge_of in zip(ones, edges, strict=True):
        for kind, (after, before) in zip(of_edge, ((1, 1), (0, 0), (0, 1)), strict=True):
            for t in range(C):
                edge = edge_of(t)
                # tokens whose gates are between, of a token after the edge, or before it
                span = slice(edge, t + after) if t >= edge else slice(t + before, edge)
                assert kind[t] @ g == g[span].sum(), (t, edge)


@wants.triton
def test_kept_ones_are_of_the_call() -> None:
    calls = [("cpu", C, torch.float32), ("meta", C, torch.float32), ("cpu", 16, torch.float32)]
    for device, size, dtype in [*calls, ("cpu", C, torch.bfloat16)]:
        for _ in range(2):
            ones = gate_ones.gate_ones(torch.device(device), size, dtype)
            assert (ones.device.type, ones.shape[-1], ones.dtype) == (device, size, dtype)


@wants.triton
def test_ones_are_kept_unless_of_a_graph() -> None:
    """Whose would not be there until its replay, nor after its end. The copy from the CPU waits for
    itself: a kernel of another stream may read what is kept at once."""
    device, made, found = torch.device("cuda", 0), mock.Mock(), []
    with mock.patch.object(gate_ones, "_cached", {}), mock.patch.object(gate_ones, "_made", made):
        for captures in (True, False, True):
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda x=captures: x):
                found.append(gate_ones.gate_ones(device, C, torch.bfloat16))
    of_graph, first, again = found
    places = [device, torch.device("cpu")]
    assert [x.args for x in made.call_args_list] == [(x, C, torch.bfloat16) for x in places]
    made.return_value.to.assert_called_once_with(device)
    assert of_graph is made.return_value
    assert first is again is made.return_value.to.return_value

"""The properties of the linear family's terms, kernels/linear/inputs.py:Term."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import probe
from slipstream.kernels.linear.dispatch import LinearOptions, check
from slipstream.kernels.linear.inputs import TERMS, TOKEN_TERMS, LinearInputs, not_taken
from slipstream.kernels.linear.sm90 import plan as sm90_plan
from slipstream.kernels.linear.triton import plan as triton_plan

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
    taken = [triton_plan.TERMS_TAKEN, sm90_plan.TRANSITION_TERMS]
    taken += [sm90_plan.SCALAR_DECAY_TERMS, sm90_plan.VECTOR_DECAY_TERMS]
    for names in taken:
        assert set(names) <= set(LinearInputs._fields)
    assert not_taken(everything(), triton_plan.TERMS_TAKEN) is None
    assert not_taken(everything(), sm90_plan.TRANSITION_TERMS) == "it takes no gv"

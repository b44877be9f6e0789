"""Every module of slipstream.nn and every layer with what looks at it, and in the settings that it
runs in: hooks, modes, subclasses of Tensor, default dtypes, threads, torch.func, export."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support import small_modules
from tests.support.small_modules import Call, Module, every_subject, flat, modules, results, sample
from tests.support.user_inputs import default_dtype

pytestmark = small_modules.EXPECTED_WARNINGS


def backward_hooks(plain: Module, changed: Module) -> Call:
    """On every inner module: torch makes views of what goes in and comes out."""
    for module in changed.modules():
        module.register_full_backward_pre_hook(lambda module, grads: None)
        module.register_full_backward_hook(lambda module, grads, of_outputs: None)
    return changed


def within(make: Callable[[], Any], plain: Module, changed: Module) -> Call:
    def call(*given: Tensor) -> Any:
        with make():
            return changed(*given)

    return call


def kept_elsewhere() -> Any:
    """Activations, as torch's save_on_cpu and others keep them."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.detach().numpy().copy(), lambda x: torch.from_numpy(x)
    )


class Marked(Tensor):
    """A subclass with nothing of its own."""


def subclassed(plain: Module, changed: Module) -> Call:
    def call(*given: Tensor) -> Any:
        found = flat(changed(*(x.as_subclass(Marked) for x in given)))
        return [x.as_subclass(Tensor) for x in found]

    return call


def in_place_after(plain: Module, changed: Module) -> Call:
    """x += module(x), and the like."""

    def call(*given: Tensor) -> Any:
        return [x.mul_(1.0) for x in flat(changed(*given))]

    return call


def used_for_inference(plain: Module, changed: Module) -> Call:
    with torch.inference_mode():
        changed(*small_modules.leaves(plain.given))  # pyright: ignore
    return changed


WAYS: dict[str, small_modules.Way] = {
    "backward hooks": backward_hooks,
    "activations elsewhere": partial(within, kept_elsewhere),
    "flops counted": partial(within, lambda: FlopCounterMode(display=False)),
    "anomalies looked for": partial(within, lambda: torch.autograd.detect_anomaly()),
    "subclass": subclassed,
    "in place after": in_place_after,
    "inference before": used_for_inference,
    "float64 by default": partial(within, lambda: default_dtype(torch.float64)),
    "bfloat16 by default": partial(within, lambda: default_dtype(torch.bfloat16)),
    "meta by default": partial(within, lambda: torch.device("meta")),
}

# what torch does otherwise
EXEMPT = {("LinearKLDivLoss", "backward hooks"): "a gradient of zeros where there was none"}


@pytest.mark.parametrize(
    ("name", "way"), [x for x in itertools.product(small_modules.SUBJECTS, WAYS) if x not in EXEMPT]
)
@sample
def test_module_is_the_same(name: str, way: str) -> None:
    plain, changed, given = modules(name)
    plain.given = given  # pyright: ignore
    call = WAYS[way](plain, changed)
    small_modules.assert_same(results(changed, call, given), results(plain, plain, given))


@every_subject
@sample
@torch.no_grad()
def test_nonfinite_stays_in_its_sequence(name: str) -> None:
    plain, _, given = modules(name)
    if given[0].dim() < 3:
        return  # nothing but rows
    for wrong in (torch.nan, torch.inf):
        inputs = [x.clone() for x in given]
        for x in inputs:
            x[1, 2] = wrong
        for x, y in zip(flat(plain(*inputs)), flat(plain(*given)), strict=True):
            torch.testing.assert_close(x[0], y[0])
            assert not x[1].isfinite().all()


@every_subject
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@sample
@torch.no_grad()
def test_ensemble_is_a_loop_or_refused(name: str) -> None:
    plain, other, given = modules(name)
    if not any(True for _ in plain.parameters()):
        return
    for p in other.parameters():
        p.mul_(1.1)
    stacked = torch.func.stack_module_state([plain, other])  # pyright: ignore
    skeleton = copy.deepcopy(plain).to("meta")

    def one(parameters: Any, buffers: Any, *inputs: Tensor) -> list[Tensor]:
        return flat(torch.func.functional_call(skeleton, (parameters, buffers), inputs))

    places = 0, 0, *(None for _ in given)
    try:
        got = torch.func.vmap(one, places)(*stacked, *given)
    except NotImplementedError as error:
        if "slipstream" not in str(error):
            raise
        return
    for k, module in enumerate((plain, other)):
        for x, y in zip(got, flat(module(*given)), strict=True):
            torch.testing.assert_close(x[k], y, rtol=1e-4, atol=1e-5)


@every_subject
@pytest.mark.sample(which=lambda name: name in ("LinearKLDivLoss", "GatedDeltaNet"))
@torch.no_grad()
def test_export_takes_any_number_of_rows(name: str) -> None:
    """Rows are sequences and tokens: more than those for which a layer goes token by token."""
    plain, changed, given = modules(name)
    both = [x.dim() > 2 or len(x) == 2 for x in given]
    shapes = tuple(dict.fromkeys(range(1 + x), torch.export.Dim.DYNAMIC) for x in both)
    program = torch.export.export(changed, given, dynamic_shapes=shapes, strict=False).module()
    more = [torch.cat([x, x, x[:1]]) for x in given]
    more = [torch.cat([x, x, x], 1) if y else x for x, y in zip(more, both)]
    for inputs in (given, more):
        torch.testing.assert_close(
            flat(program(*inputs)), flat(plain(*inputs)), rtol=1e-4, atol=1e-5
        )

"""Every module of slipstream.nn and every layer as users and libraries change them: weights made
anew before each call, shared, frozen, quantized or of another dtype, and modules that hooks, modes
and settings of torch look at. Ways of training are in test_ways.py."""

import copy
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from slipstream.layers import Mixer
from tests.support.small_modules import (
    LAYERS,
    SUBJECTS,
    Later,
    assert_same,
    flat,
    is_sample,
    leaves,
    modules,
    results,
    total,
)

Module = torch.nn.Module
Call = Callable[..., Any]
# changes a module, or the plain one that it shall equal, and returns how to call it
Way = Callable[[Module, Module], Call]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
every_subject = pytest.mark.parametrize("name", SUBJECTS)
sample = pytest.mark.sample(which=lambda name, **_: is_sample(name))


def owned(module: Module, matrices: bool = False) -> list[tuple[str, Module, str]]:
    """Every parameter that learns, or every weight that is a matrix, by the module that has it."""
    found = []
    for at, m in module.named_modules():
        for n, p in m.named_parameters(recurse=False):
            if p.requires_grad and (not matrices or (n == "weight" and p.dim() > 1)):
                found.append((at, m, n))
    return found


# ---- weights that are made before they are used


class Scaled(Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


def parametrized(plain: Module, changed: Module) -> Call:
    """Every parameter, not those of linear layers alone."""
    for _, module, name in owned(changed):
        parametrize.register_parametrization(module, name, Scaled())
    with torch.no_grad():
        for p in plain.parameters():
            if p.requires_grad:
                p.mul_(1.5)
    return changed


def normed(plain: Module, changed: Module, norm: Call) -> Call:
    """norm begins with the weight that there was."""
    for _, module, _ in owned(changed, matrices=True):
        norm(module)
    return changed


def spectral(plain: Module, changed: Module) -> Call:
    for at, module, _ in owned(changed.eval(), matrices=True):
        parametrizations.spectral_norm(module)
        with torch.no_grad():
            plain.get_submodule(at).weight.copy_(module.weight)  # pyright: ignore
    return changed


def pruned(plain: Module, changed: Module) -> Call:
    for at, module, _ in owned(changed, matrices=True):
        prune.random_unstructured(module, "weight", 0.3)
        with torch.no_grad():
            plain.get_submodule(at).weight.mul_(module.weight_mask)  # pyright: ignore
    return changed


def averaged(plain: Module, changed: Module) -> Call:
    """The copy of an average, of a module that has been used."""
    changed(*leaves(plain.given))  # pyright: ignore
    if not any(True for _ in changed.parameters()):
        return changed  # which torch's average refuses
    average = AveragedModel(changed, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(changed)
    return average.module


REMADE: dict[str, Way] = {
    "parametrized": parametrized,
    "weight_norm": partial(normed, norm=parametrizations.weight_norm),
    "hooked weight_norm": partial(normed, norm=torch.nn.utils.weight_norm),
    "spectral_norm": spectral,
    "pruned": pruned,
    "averaged": averaged,
}


@every_subject
@pytest.mark.parametrize("way", REMADE)
@sample
def test_module_with_weights_made_anew(name: str, way: str) -> None:
    """The outputs, the inputs' gradients, and one for every parameter that has one as it was."""
    plain, changed, given = modules(name)
    plain.given = given  # pyright: ignore
    call = REMADE[way](plain, changed)
    got = results(call, call, given)  # pyright: ignore
    want = results(plain.train(call.training), plain, given)  # pyright: ignore
    inputs = {n: x for n, x in want[1].items() if n.startswith("input")}
    assert_same((got[0], {n: x for n, x in got[1].items() if n in inputs}), (want[0], inputs))
    assert len(got[1]) >= len(want[1])


def steps(layer: Any, x: Tensor, begin: int = 4) -> Tensor:
    """All tokens of x, those from `begin` on one by one."""
    y, state = layer(x[:, :begin], use_cache=True)[:2]
    for name in layer.token_states:
        room = [0, 0] * (state[name].dim() - 2) + [0, x.shape[1] - begin]
        state[name] = torch.nn.functional.pad(state[name], room)
    later = [layer.step(x[:, t : t + 1], state) for t in range(begin, x.shape[1])]
    return torch.cat([y, *later], 1)


STEPPED = [n for n in LAYERS if isinstance(SUBJECTS[n].make(), Mixer)]
STEPPED = [n for n in STEPPED if not n.startswith("Bidirectional")]


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("way", REMADE)
@sample
@torch.no_grad()
def test_steps_with_weights_made_anew(name: str, way: str) -> None:
    plain, changed, given = modules(name)
    plain.given = given  # pyright: ignore
    call = REMADE[way](plain, changed)
    torch.testing.assert_close(steps(call, *given), steps(plain, *given), rtol=1e-4, atol=1e-5)


class Int8(torch.nn.Linear):
    """As bitsandbytes': a forward of its own, of a weight with other shape and dtype."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        w = base.weight.detach()
        self.scale = w.abs().amax(1, keepdim=True) / 127
        codes = (w / self.scale).round().to(torch.int8).view(-1, 1)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.bias = base.bias

    def forward(self, input: Tensor) -> Tensor:
        w = self.weight.view(self.out_features, self.in_features) * self.scale
        return torch.nn.functional.linear(input, w, self.bias)


def int8(module: Module) -> Module:
    for at, linear in list(module.named_modules()):
        if isinstance(linear, torch.nn.Linear) and at:
            parent, _, child = at.rpartition(".")
            setattr(module.get_submodule(parent), child, Int8(linear))
    return module


def torchao(module: Module) -> Module:
    """Where its kernels run on a CPU."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module


QUANTIZED: dict[str, Callable[[Module], Module]] = {
    "int8": int8,
    "dynamic": lambda x: torch.ao.quantization.quantize_dynamic(x, {torch.nn.Linear}),
    "torchao": torchao,
}


@every_subject
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torchao.*")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.sample(which=lambda name, kind: is_sample(name) and kind != "torchao")
def test_module_with_quantized_linears(name: str, kind: str) -> None:
    plain, changed, given = modules(name)
    if name == "Linear":
        return  # itself one
    changed = QUANTIZED[kind](changed)
    with torch.no_grad():
        got, want = flat(changed(*given)), flat(plain(*given))
        if name in STEPPED:
            got.append(steps(changed, *given))
            want.append(want[0])
            if kind != "dynamic":  # which rounds all tokens by one scale
                torch.testing.assert_close(got[-1], got[0], rtol=1e-3, atol=1e-3)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert float((x - y).norm()) <= 0.3 * max(float(y.norm()), 1.0)
    if kind == "int8" and any(x.is_floating_point() for x in given):
        inputs = leaves(given)
        total(changed(*inputs)).backward()
        assert inputs[0].grad is not None


# ---- which parameters there are


@every_subject
@sample
def test_each_parameter_frozen_and_alone(name: str) -> None:
    plain, changed, given = modules(name)
    want = results(plain, plain, given)[1]
    learned = [n for n, p in plain.named_parameters() if p.requires_grad]
    parameters = dict(changed.named_parameters())
    for one, alone in itertools.product(learned, (True, False)):
        for n in learned:
            parameters[n].grad = None
            parameters[n].requires_grad_((n == one) is alone)
        loss = total(changed(*given))
        if loss.requires_grad:
            loss.backward()
        got = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        assert got.keys() == {n for n in want if n in learned and parameters[n].requires_grad}
        assert_same(([], got), ([], {n: want[n] for n in got}))
    changed.requires_grad_(False)
    changed.zero_grad()
    if any(x.is_floating_point() for x in given):
        got = results(changed, changed, given)[1]
        inputs = {n: x for n, x in want.items() if n.startswith("input")}
        assert_same(([], got), ([], inputs))


@every_subject
@sample
def test_parameters_of_one_shape_are_one(name: str) -> None:
    """Each pair of parameters that could be one: its gradient is the sum."""
    plain, changed, given = modules(name)
    first: dict[Any, tuple[str, Module, str]] = {}
    shared: dict[int, list[tuple[str, str]]] = {}
    for at, module, n in owned(changed):
        p = getattr(module, n)
        here = first.setdefault((tuple(p.shape), type(module), n), (at, module, n))
        one = getattr(here[1], here[2])
        shared.setdefault(id(one), []).append((at, n))
        setattr(module, n, one)
        with torch.no_grad():
            getattr(plain.get_submodule(at), n).copy_(one)
    got, want = results(changed, changed, given), results(plain, plain, given)
    assert_same((got[0], {}), (want[0], {}))
    for places in shared.values():
        names = [f"{at}.{n}" if at else n for at, n in places]
        found = [want[1][n] for n in names if n in want[1]]
        if found:
            assert_same(([], {names[0]: got[1][names[0]]}), ([], {names[0]: sum(found)}))  # pyright: ignore


@every_subject
@sample
def test_copies_of_a_used_module(name: str) -> None:
    plain, used, given = modules(name)
    results(used, used, given)
    used.zero_grad()
    copies = [copy.deepcopy(used)]
    if not isinstance(used, Later) and name != "LinearKLDivLoss":
        held = io.BytesIO()
        torch.save(used, held)
        held.seek(0)
        copies.append(torch.load(held, weights_only=False))
    want = results(plain, plain, given)
    for x in copies:
        assert_same(results(x, x, given), want)


@every_subject
@sample
def test_state_dict_is_assigned(name: str) -> None:
    plain, changed, given = modules(name)
    called: list[str] = []
    changed.register_state_dict_post_hook(lambda *_: called.append("saved"))
    changed.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    changed.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    weights = {n: x.clone() for n, x in changed.state_dict().items()}
    for p in changed.parameters():
        torch.nn.init.constant_(p, torch.nan)
    assert changed.load_state_dict(weights, assign=True) == ([], [])
    for (_, p), (_, q) in zip(changed.named_parameters(), plain.named_parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    assert called == ["saved", "before", "after"]
    assert_same(results(changed, changed, given), results(plain, plain, given))


@every_subject
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["data", "swapped"])
@pytest.mark.sample(which=lambda name, dtype, swapped: is_sample(name) and not swapped)
def test_module_of_another_dtype(name: str, dtype: torch.dtype, swapped: bool) -> None:
    """Outputs in it, but for losses, which are wide; gradients in the parameters' own."""
    plain, changed, given = modules(name)
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        changed = changed.to(dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
    got, want = results(changed, changed, inputs), results(plain, plain, given)
    error = {torch.bfloat16: 0.3, torch.float16: 0.05, torch.float64: 1e-5}[dtype]
    wide = torch.promote_types(dtype, torch.float32)
    for x, y in zip(got[0], want[0], strict=True):
        assert x.dtype == (wide if "Loss" in name else dtype)
        assert float((x.float() - y).norm()) <= error * max(float(y.norm()), 0.5)
    assert got[1].keys() == want[1].keys()
    for n, y in want[1].items():
        assert got[1][n].dtype == dtype
        assert float((got[1][n].float() - y).norm()) <= error * max(float(y.norm()), 0.5), n


# ---- what looks at a module, and what it runs in


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
        changed(*leaves(plain.given))  # pyright: ignore
    return changed


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


WAYS: dict[str, Way] = {
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
    ("name", "way"), [x for x in itertools.product(SUBJECTS, WAYS) if x not in EXEMPT]
)
@sample
def test_module_is_the_same(name: str, way: str) -> None:
    plain, changed, given = modules(name)
    plain.given = given  # pyright: ignore
    call = WAYS[way](plain, changed)
    assert_same(results(changed, call, given), results(plain, plain, given))


@every_subject
@sample
def test_threads_get_the_same(name: str) -> None:
    plain, changed, given = modules(name)
    want, found = results(plain, plain, given), []

    def work() -> None:
        mine = copy.deepcopy(changed)
        for _ in range(2):
            mine.zero_grad()
            found.append(results(mine, mine, given))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for got in found:
        assert_same(got, want)


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
    """Of sequences, and of tokens: more than those for which a layer goes token by token."""
    plain, changed, given = modules(name)
    both = [x.dim() > 2 or len(x) == 2 for x in given]
    shapes = tuple(dict.fromkeys(range(1 + x), torch.export.Dim.DYNAMIC) for x in both)
    program = torch.export.export(changed, given, dynamic_shapes=shapes, strict=False).module()
    more = [torch.cat([x, x, x[:1]]) for x in given]
    more = [torch.cat([x, x, x], 1) if y else x for x, y in zip(more, both)]
    for inputs in (given, more):
        for x, y in zip(flat(program(*inputs)), flat(plain(*inputs)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)

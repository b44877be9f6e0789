"""Every module of slipstream.nn and every layer as users and libraries change them: weights made
anew before each call, shared, frozen, quantized or of another dtype. What looks at modules is in
test_module_settings.py, ways of training in test_ways.py."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from slipstream.layers import Mixer
from tests.support import small_modules
from tests.support.small_modules import Call, Module, assert_same, every_subject, modules, results

pytestmark = small_modules.EXPECTED_WARNINGS


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
    changed(*small_modules.leaves(plain.given))  # pyright: ignore
    if not any(True for _ in changed.parameters()):
        return changed  # which torch's average refuses
    average = AveragedModel(changed, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(changed)
    return average.module


REMADE: dict[str, small_modules.Way] = {
    "parametrized": parametrized,
    "weight_norm": partial(normed, norm=parametrizations.weight_norm),
    "hooked weight_norm": partial(normed, norm=torch.nn.utils.weight_norm),
    "spectral_norm": spectral,
    "pruned": pruned,
    "averaged": averaged,
}


@every_subject
@pytest.mark.parametrize("way", REMADE)
@small_modules.sample
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


STEPPED = [n for n in small_modules.LAYERS if isinstance(small_modules.SUBJECTS[n].make(), Mixer)]


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("way", REMADE)
@small_modules.sample
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
@pytest.mark.sample(which=lambda name, kind: small_modules.is_sample(name) and kind != "torchao")
def test_module_with_quantized_linears(name: str, kind: str) -> None:
    plain, changed, given = modules(name)
    if name == "Linear":
        return  # itself one
    changed = QUANTIZED[kind](changed)
    with torch.no_grad():
        got, want = small_modules.flat(changed(*given)), small_modules.flat(plain(*given))
        if name in STEPPED:
            got.append(steps(changed, *given))
            want.append(want[0])
            if kind != "dynamic":  # which rounds all tokens by one scale
                torch.testing.assert_close(got[-1], got[0], rtol=1e-3, atol=1e-3)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert float((x - y).norm()) <= 0.3 * max(float(y.norm()), 1.0)
    if kind == "int8" and any(x.is_floating_point() for x in given):
        inputs = small_modules.leaves(given)
        small_modules.total(changed(*inputs)).backward()
        assert inputs[0].grad is not None


# ---- which parameters there are


@every_subject
@small_modules.sample
def test_each_parameter_frozen_and_alone(name: str) -> None:
    plain, changed, given = modules(name)
    want = results(plain, plain, given)[1]
    learned = [n for n, p in plain.named_parameters() if p.requires_grad]
    parameters = dict(changed.named_parameters())
    for one, alone in itertools.product(learned, (True, False)):
        for n in learned:
            parameters[n].grad = None
            parameters[n].requires_grad_((n == one) is alone)
        loss = small_modules.total(changed(*given))
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
@small_modules.sample
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["data", "swapped"])
@pytest.mark.sample(
    which=lambda name, dtype, swapped: small_modules.is_sample(name) and not swapped
)
def test_module_of_another_dtype(name: str, dtype: torch.dtype, swapped: bool) -> None:
    """Outputs in it, but for losses and for weights of streams, which are wide; gradients in the
    parameters' own."""
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
    for n, (x, y) in enumerate(zip(got[0], want[0], strict=True)):
        is_wide = "Loss" in name or (name == "HyperConnection" and n > 0)
        assert x.dtype == (wide if is_wide else dtype)
        assert float((x.float() - y).norm()) <= error * max(float(y.norm()), 0.5)
    assert got[1].keys() == want[1].keys()
    for n, y in want[1].items():
        assert got[1][n].dtype == dtype
        assert float((got[1][n].float() - y).norm()) <= error * max(float(y.norm()), 0.5), n


# ---- what looks at a module, and what it runs in

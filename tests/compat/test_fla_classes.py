"""fla's classes of torch.autograd.Function, and its modules under their other names."""

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.compat import install
from slipstream.compat.fla.paths import ALIASES, AUTOGRAD

ROOT = "slipstream.compat.fla"


@pytest.mark.parametrize("path", sorted(ALIASES))
def test_other_names_are_modules_of_fla(path: str) -> None:
    """Imported before their parents: what has no file here is a package too."""
    with install("fla"):
        found = importlib.import_module(f"fla.{path}")
        assert found is importlib.import_module(f"{ROOT}.{ALIASES[path]}")
        with pytest.raises(ModuleNotFoundError, match=rf"Slipstream has no fla\.{path}\.other"):
            importlib.import_module(f"fla.{path}.other")


def calls(path: str) -> tuple[list[Any], dict[str, Any], int]:
    """Arguments of apply(), those of the function, and how many of them have gradients."""
    offsets = torch.tensor([0, 5, 12])
    if path == "modules.convolution":
        x, weight = torch.randn(1, 12, 8), torch.randn(8, 4)
        given = [x, weight, None, None, None, True, "silu", offsets, None, None, 32]
        names = {"x": x, "weight": weight, "output_final_state": True, "activation": "silu"}
        return given, {**names, "cu_seqlens": offsets}, 2
    q, k, v = torch.randn(3, 1, 12, 2, 8).unbind()
    g, beta = F.logsigmoid(torch.randn(1, 12, 2)), torch.rand(1, 12, 2)
    names = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 0.5}
    names |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": offsets}
    if path == "ops.gated_delta_rule.chunk":
        return [q, k, v, g, beta, 0.5, None, True, False, offsets, None, None, True], names, 5
    given = [q, k, v, g, None, None, beta, None, None, 0.5, None, True, True, False, False, False]
    return [*given, offsets], names, 5


@pytest.mark.parametrize("path", sorted(AUTOGRAD))
def test_apply_is_the_function(path: str) -> None:
    name, function, signature = AUTOGRAD[path]
    module: Any = importlib.import_module(f"{ROOT}.{path}")
    cls = getattr(module, name)
    assert issubclass(cls, torch.autograd.Function) and cls.__name__ == name
    assert len(inspect.signature(cls.apply).parameters) == signature.count(", ") + 1
    args, given, count = calls(path)
    tensors = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for x in tensors[:count]:
        x.requires_grad_()
    outputs = cls.apply(*args), getattr(module, function)(**given)
    grads = [torch.autograd.grad(o.square().sum() + s.sum(), tensors[:count]) for o, s in outputs]
    for one, two in ((*outputs,), (*grads,)):
        assert len(one) == len(two) > 1
        for x, y in zip(one, two):
            assert torch.equal(x, y)
    with pytest.raises(TypeError):
        cls.apply(*args, *[None] * 20)


def test_imports_leave_members_alone() -> None:
    """Of every module: importing one makes it a member of its parent, where a function may have its
    name, or another module, as slipstream.ops in fla.modules.rotary."""

    def members() -> dict[tuple[str, str], Any]:
        found = {}
        for name in sorted(x for x in sys.modules if x.startswith(f"{ROOT}.")):
            for key, value in vars(sys.modules[name]).items():
                if key[0] != "_":
                    found[name, key] = value
        return found

    before = members()
    with install("fla"):
        for name in sorted(x for x in sys.modules if x.startswith(f"{ROOT}.")):
            importlib.import_module(name.removeprefix("slipstream.compat."))
        after = members()
    assert {x: after[x] for x in before} == before
    assert inspect.isfunction(before[f"{ROOT}.modules.conv", "causal_conv1d"])

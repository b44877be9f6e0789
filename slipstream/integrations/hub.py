"""transformers' own door to other kernels, use_kernels=True: by the package `kernels`.

transformers decorates the functions of linear layers for it too, and looks their names up in a
mapping whose entries load a class whose forward takes the place of a function's. register_kernels()
puts entries there that load slipstream's.
"""

import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations import hub_kernels
from transformers.utils import import_utils

from slipstream.integrations import linear_mixers, patching

# those that `kernels` tells apart and slipstream runs on
DEVICES = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Repository:
    """An entry of the mapping: a function of FUNCTIONS, under the name transformers has for it."""

    name: str

    def load(self) -> type[nn.Module]:
        """A class whose forward takes a call, or hands it on to the function that was there."""
        ours, full = linear_mixers.FUNCTIONS[self.name], f"kernels.{self.name}"
        made: dict[nn.Module, Any] = {}  # the functions live as long as their modules

        class Layer(nn.Module):
            can_torch_compile = True

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return ours(*args, **kwargs)
                if self not in made:
                    theirs = partial(type(self).forward, self)
                    made[self] = patching.replacement_of(ours, theirs, full)
                return made[self](*args, **kwargs)

        # `kernels` compares numbers and kinds of arguments, which all models have the same
        Layer.forward.__signature__ = inspect.signature(type(self._decorated()).forward)
        return Layer

    def _decorated(self) -> nn.Module:
        """A function of this name that `kernels` has made a module of."""
        for name in [x for x in list(sys.modules) if patching.MODELING.fullmatch(x)]:
            for value in list(vars(sys.modules[name]).values()):
                if isinstance(value, nn.Module) and patching.looked_up(value) == self.name:
                    return value
        raise FileNotFoundError(f"{self.name}: no model of transformers that is loaded calls it")


def register_kernels() -> list[str]:
    """Gives transformers' use_kernels=True slipstream's functions for linear layers.

    Models that are loaded with use_kernels=True from now on, or get it set, take these where they
    would have fetched a kernel from the hub: on CPUs too, for prompts, steps and gradients. As with
    transformers' own kernels, a function is that of all models of its module, and there is no way
    back in a process. A call that slipstream does not take goes to transformers' own function.
    Packed sequences are kept apart where the model says what is packed; patch() does it always.

    Returns:
        The names of the functions.

    Raises:
        ImportError: `kernels` is not there in the release that transformers wants.
    """
    if not import_utils.is_kernels_available():
        low, high = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        raise ImportError(f"register_kernels needs kernels: pip install 'kernels>={low},<{high}'")
    hub: Any = hub_kernels  # these names are there only then
    table, Mode = hub.get_kernel_mapping_transformers(), hub.Mode
    for name in linear_mixers.FUNCTIONS:
        modes = dict.fromkeys((Mode.INFERENCE, Mode.TRAINING), Repository(name))
        modes |= {mode | Mode.TORCH_COMPILE: entry for mode, entry in modes.items()}
        table[name] = {**table.get(name, {}), **dict.fromkeys(DEVICES, modes)}
    return list(linear_mixers.FUNCTIONS)

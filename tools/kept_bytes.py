"""The bytes that a layer keeps for its backward on a GPU, found out without one.

    python tools/kept_bytes.py                 every mixer
    python tools/kept_bytes.py kda rwkv7       some

A block of the language model, mixer and MLP, in bf16 runs on a CPU whose tensors pass for those of
an H100: operators choose, allocate and save what they would there, and kernels are replaced by
nothing. bytes: what is allocated when the forward is done, for each token and channel of the hidden
size; without: with the tensors kept that slipstream/nn/recompute.py has made again.
"""

import sys
import warnings
from typing import Any
from unittest import mock

import own_checkout  # noqa: F401
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.compiler.arch import named
from slipstream.compiler.trace import _Driver, _properties
from slipstream.models import MIXERS, SlipstreamConfig
from slipstream.models.block import Block
from slipstream.nn import recompute
from slipstream.runtime import backends, call_replay, parallel_compile

ARCH = "sm_90"
TOKENS, HIDDEN = 512, 256


class _Launcher:
    """A launcher of a kernel that does nothing."""

    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0
    function, packed_metadata = 1, ()

    @property
    def run(self) -> Any:
        return self

    def launch(self, *args: Any) -> None:
        pass

    __call__ = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch


class _Device(_Driver):
    def get_current_device(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 0


def pretend() -> None:
    """From here on, in this process, tensors of the CPU are those of an H100."""
    # imported before what it reads of a device is replaced
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime import driver, jit

    from slipstream.kernels.linear.triton.scalar_decay import tiles

    arch, launcher = named(ARCH), _Launcher()
    for target, name, value in (
        (driver, "_active", _Device(ARCH)),
        (jit.JITFunction, "run", lambda *args, **options: launcher),
        (GluonJITFunction, "run", lambda *args, **options: launcher),
        (Tensor, "is_cuda", property(lambda x: True)),
        (torch.nn.Parameter, "is_cuda", property(lambda x: True)),
        (Tensor, "get_device", lambda x: 0),
        (torch.cuda, "get_device_capability", lambda device=None: arch.capability),
        (torch.cuda, "get_device_properties", lambda device=None: _properties(arch)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_device", lambda: 0),
        (backends, "sm_count", lambda index: arch.units),
        (backends, "shared_memory_bytes", lambda index: arch.shared),
        (call_replay, "ENABLED", False),
        (parallel_compile, "compile_kernels", lambda call, args: None),
        (tiles, "family_of", lambda device: tiles.family(arch.capability)),
    ):
        mock.patch.object(target, name, value, create=True).start()


def kept(mixer: str, least: int = 1) -> float:
    """Bytes for a token and channel. least: recompute.MIN_ELEMENTS."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_heads": 2,
    }
    config = SlipstreamConfig(mixers=[mixer, mixer], **sizes)
    block = Block(config, 1).to(torch.bfloat16).train()
    x = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    first = torch.zeros_like(x) if block.mixer.takes_first_value else None
    with mock.patch.object(recompute, "MIN_ELEMENTS", least):
        block(x, first)[0].sum().backward()  # what is made once
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            y = block(x, first)[0]
    del y
    return sum(e.self_cpu_memory_usage for e in found.key_averages()) / TOKENS / HIDDEN


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pretend()
    print(f"{'':20}{'bytes':>8}{'without':>9}")
    for mixer in sys.argv[1:] or MIXERS:
        print(f"{mixer:20}{kept(mixer):>8.1f}{kept(mixer, 1 << 60):>9.1f}", flush=True)


if __name__ == "__main__":
    main()

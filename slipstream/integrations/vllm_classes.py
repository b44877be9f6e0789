"""slipstream's classes in vLLM's registries, where importing this module puts them.

vLLM calls a plugin again, in threads and in forked processes, and a module is imported once. What a
release of vLLM lacks, or calls with other arguments, is found before anything is registered.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from slipstream.integrations import usage, vllm, vllm_layers

_LAYERS = "vllm.model_executor.layers.mamba"
custom_op: Any = import_module("vllm.model_executor.custom_op")
qwen_gdn_linear_attn: Any = import_module(f"{_LAYERS}.gdn.qwen_gdn_linear_attn")
ssu_dispatch: Any = import_module(f"{_LAYERS}.ops.ssu_dispatch")


def _check(ours: Callable, theirs: Callable) -> None:
    """
    Raises:
        NotImplementedError: theirs does not begin with the arguments of ours, or has others.
    """
    want = [x for x in inspect.signature(theirs).parameters if x != "self"]
    if want != list(inspect.signature(ours).parameters)[: len(want)]:
        name = theirs.__qualname__
        raise NotImplementedError(f"{name}: slipstream knows it with other arguments than {want}")


# Derived from vLLM's, since building theirs makes an object of this class: Python runs __init__
# only of an object of the class that was called.
class ChunkGatedDeltaRule(qwen_gdn_linear_attn.ChunkGatedDeltaRule):
    """vLLM's layer that prefills Gated DeltaNet."""

    def __init__(self) -> None:
        # without the choice of another backend that vLLM's layer makes, warms up and logs
        custom_op.CustomOp.__init__(self)
        self.gdn_prefill_backend = "slipstream"

    @usage.counted("vllm", "ChunkGatedDeltaRule")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vllm.chunk_gated_delta_rule(*args, **kwargs)


class SSUBackend(ssu_dispatch.MambaSSUBackend):
    """vLLM's update of Mamba's states."""

    def __init__(self, mamba_config: Any) -> None:
        super().__init__(mamba_config)
        if mamba_config.enable_stochastic_rounding:
            raise NotImplementedError("enable_stochastic_rounding: states are rounded to nearest")

    @property
    def name(self) -> str:
        return "slipstream"

    @usage.counted("vllm", "MambaSSUBackend")
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        vllm.selective_state_update(*args, **kwargs)


_check(vllm.chunk_gated_delta_rule, qwen_gdn_linear_attn.ChunkGatedDeltaRule.forward_native)
_check(vllm.selective_state_update, ssu_dispatch.MambaSSUBackend.__call__)
table, triton = ssu_dispatch._BACKEND_REGISTRY, ssu_dispatch.MambaBackendEnum.TRITON
custom_op.CustomOp.register_oot(name="ChunkGatedDeltaRule")(ChunkGatedDeltaRule)
table[triton] = SSUBackend
for _name in ("ChunkGatedDeltaRule", "MambaSSUBackend"):
    usage.site("vllm", _name)
vllm_layers.register()

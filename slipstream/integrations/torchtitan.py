"""torchtitan's Qwen3.5 by slipstream: overrides for torchtitan's option --override.imports.

    torchrun ... -m torchtitan.train --module qwen3_5 --config qwen35_0_8b \\
        --override.imports slipstream.integrations.torchtitan.gated_delta_net,\\
    slipstream.integrations.torchtitan.attention,slipstream.integrations.torchtitan.norm

or all three, also where fla is not installed, which torchtitan imports:

    torchrun ... -m torchtitan.train --config qwen35_0_8b \\
        --module slipstream.integrations.torchtitan

Written for torchtitan 0.3.0. Parameters, their names and how they are sharded stay torchtitan's.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import local_map

from slipstream import compat, ops
from slipstream.integrations import usage

if find_spec("fla") is None:
    compat.install("fla")
spmd: Any = import_module("spmd_types")
config: Any = import_module("torchtitan.config.override")
common: Any = import_module("torchtitan.models.common.attention")
module: Any = import_module("torchtitan.protocols.module")
qwen: Any = import_module("torchtitan.models.qwen3_5.model")
_CONFIGS = "torchtitan.models.qwen3_5.config_registry"
NAMES = ("gated_delta_net", "attention", "norm")


def __getattr__(name: str) -> Callable[[], Any]:
    """torchtitan's configurations of Qwen3.5 by their names, with all overrides of this module."""
    if name.startswith("_") or not hasattr(found := import_module(_CONFIGS), name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def configured() -> Any:
        made = getattr(found, name)()
        made.override.imports = [*made.override.imports, *(f"{__name__}.{x}" for x in NAMES)]
        return made

    return configured


def _untyped(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """The result, which has the type of x where torchtitan checks types."""
    with spmd.no_typecheck():
        y = function(x, *others)
    if spmd.is_type_checking():
        spmd.assert_type_like(y, x)
    return y


def _on_shards(function: Callable[..., Tensor], x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """As _untyped, of local tensors where x is a DTensor. All ranks have the whole weight, and each
    has a part of its gradient where x is cut."""
    if not isinstance(x, DTensor):
        return _untyped(function, x, weight, *others)
    cut = (x.placements,) * len(others)
    of_weight = tuple(Partial() if isinstance(p, Shard) else p for p in x.placements)
    mapped: Any = local_map(
        function,
        out_placements=(x.placements,),
        in_placements=(x.placements, weight.placements, *cut),  # pyright: ignore
        in_grad_placements=(x.placements, of_weight, *cut),
        device_mesh=x.device_mesh,
    )
    return mapped(x, weight, *others)


@usage.counted("torchtitan", "short_convolution")
def _convolve(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """x [1, T, D], weight [D, 1, W]."""
    y, _ = ops.short_convolution(x, weight.squeeze(1), activation="silu", cu_seqlens=cu_seqlens)
    return y


@usage.counted("torchtitan", "GatedDeltaKernel")
def _gated_delta(
    v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, step: bool, offsets: Tensor | None
) -> Tensor:
    rule = ops.fused_recurrent_gated_delta_rule if step else ops.chunk_gated_delta_rule
    return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)[0]


@usage.counted("torchtitan", "RMSNormGated")
def _norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return ops.rms_norm_gated(x, gate, weight, eps=eps)


@usage.counted("torchtitan", "OffsetRMSNorm")
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps=eps, zero_centered=True)


@usage.counted("torchtitan", "attention")
def _attention(q: Tensor, k: Tensor, v: Tensor, masks: Any, scale: float | None) -> Tensor:
    B, L = q.shape[:2]
    o = ops.attention(
        *(x.reshape(1, B * L, *x.shape[2:]) for x in (q, k, v)),
        scale=scale,
        cu_seqlens=masks.cu_seq_q,
    )
    return o.reshape(B, L, *o.shape[2:])


class OffsetRMSNorm(qwen.OffsetRMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(qwen.OffsetRMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return _on_shards(lambda x, w: _norm(x, w, self.eps), x, self.weight)


class RMSNormGated(qwen.RMSNormGated):
    @dataclass(kw_only=True, slots=True)
    class Config(qwen.RMSNormGated.Config):
        pass

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return _on_shards(
            lambda x, w, gate: _norm_gated(x, w, gate, self.eps), x, self.weight, gate
        )


class GatedDeltaKernel(qwen.GatedDeltaKernel):
    @dataclass(kw_only=True, slots=True)
    class Config(qwen.GatedDeltaKernel.Config):
        pass

    def forward(
        self,
        xq_BLNK: Tensor,
        xk_BLNK: Tensor,
        xv_BLNV: Tensor,
        g_BLN: Tensor,
        beta_BLN: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        """cu_seqlens_cpu has no effect. torchtitan hands over a rank's own tensors."""
        step = self.backend == "fla_fused_recurrent"
        return _untyped(_gated_delta, xv_BLNV, xq_BLNK, xk_BLNK, g_BLN, beta_BLN, step, cu_seqlens)


class GatedDeltaNet(qwen.GatedDeltaNet):
    @dataclass(kw_only=True, slots=True)
    class Config(qwen.GatedDeltaNet.Config):
        pass

    def _causal_conv(
        self,
        x_BLD: Tensor,
        conv: Any,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        offsets = () if cu_seqlens is None else (cu_seqlens,)
        if isinstance(x_BLD, DTensor):
            return self._local_map_conv(x_BLD, conv, _convolve, *offsets)
        return _untyped(_convolve, x_BLD, conv.weight, *offsets)


class VarlenAttention(common.VarlenAttention):
    """In the place of FlexAttention too: the model makes offsets of documents for it, no mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(common.VarlenAttention.Config):
        pass

    def __init__(self, config: Any) -> None:
        module.Module.__init__(self)  # without FlashAttention-3, which torchtitan switches on

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        """others: enable_gqa, which follows from the heads."""
        return _untyped(_attention, q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)


@config.override(target=qwen.GatedDeltaNet.Config, description="slipstream's gated delta rule")
def gated_delta_net(cfg: Any) -> Any:
    """The recurrence, its convolutions and its gated norm."""
    return config.derive(
        cfg,
        GatedDeltaNet.Config,
        kernel=config.derive(cfg.kernel, GatedDeltaKernel.Config),
        norm=config.derive(cfg.norm, RMSNormGated.Config),
    )


@config.override(target=qwen.Qwen35Attention.Config, description="slipstream's attention")
def attention(cfg: Any) -> Any:
    """Softmax attention among each document's tokens, and the norms of queries and keys.

    Raises:
        NotImplementedError: torchtitan's attention is neither its flexible nor its packed one, or
            has a window.
    """
    inner = cfg.inner_attention
    known = (common.FlexAttention.Config, common.VarlenAttention.Config)
    if not isinstance(inner, known) or getattr(inner, "window_size", (-1, 0)) != (-1, 0):
        raise NotImplementedError(f"inner_attention: slipstream does not replace {inner}")
    q_norm, k_norm = (config.derive(x, OffsetRMSNorm.Config) for x in (cfg.q_norm, cfg.k_norm))
    inner = config.derive(inner, VarlenAttention.Config)
    return dataclasses.replace(cfg, inner_attention=inner, q_norm=q_norm, k_norm=k_norm)


# not those of queries and keys, which are attention's
@config.override(
    target=qwen.OffsetRMSNorm.Config,
    fqns=["*.attention_norm", "*.ffn_norm", "*.norm"],
    description="slipstream's RMSNorm",
)
def norm(cfg: Any) -> Any:
    """The norms before each layer's two halves, and the last."""
    return config.derive(cfg, OffsetRMSNorm.Config)


_COUNTED = ("short_convolution", "GatedDeltaKernel", "RMSNormGated", "OffsetRMSNorm", "attention")
for _name in _COUNTED:
    usage.site("torchtitan", _name)

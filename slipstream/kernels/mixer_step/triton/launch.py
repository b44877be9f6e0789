"""Launches of the step: one, without a copy of an input that has its heads in a row.

Memory beyond the result: a counter for each slot, head of q and k and group of the norm, which are
there as long as the pool is; float32 o where a norm is over more channels than a program has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.mixer_step.inputs import (
    StepInputs,
    StepOptions,
    counters_of,
    drafts_on_sm90,
)
from slipstream.kernels.mixer_step.triton.step import mixer_step_kernel
from slipstream.kernels.primitives.device import PREFETCH_ROWS
from slipstream.runtime import backends, launch_cache, token_ids


@dataclass(frozen=True)
class StepTile:
    """BV columns of the state a program, at most. registers: of a thread, None for any number."""

    BV: int
    warps: int
    registers: int | None = None


# BK -> tile; widths alone decide, so a sequence's result is the same bits in every batch.
TILES = {
    16: StepTile(128, 1),
    32: StepTile(128, 2),
    64: StepTile(128, 4),
    128: StepTile(128, 4),
    256: StepTile(64, 8),
    512: StepTile(32, 8),
    1024: StepTile(16, 8),
}
# V first, without a convolution and a norm, for which programs of narrow tiles would share work
PLAIN_TILES = TILES | {128: StepTile(16, 1)}


def tile_of(K: int, V: int, plain: bool = False) -> tuple[int, StepTile]:
    """BK, and the tile cut to V."""
    BK = max(16, 1 << (K - 1).bit_length())
    tile = (PLAIN_TILES if plain else TILES)[BK]
    BV = min(tile.BV, max(16, 1 << (V - 1).bit_length()))
    return BK, StepTile(BV, max(tile.warps * BV // tile.BV, 1), tile.registers)


def line_of(BK: int, dtype: torch.dtype) -> int:
    """The numbers, of the BK of a column V-first, that lie in 128 bytes of memory."""
    return min(BK, 128 // dtype.itemsize)


def counters(inputs: StepInputs, options: StepOptions) -> Tensor | None:
    """The counters of the programs, where there are some."""
    each = counters_per_slot(inputs, options)
    return None if each is None else counters_of(inputs.state, each)


def counters_per_slot(inputs: StepInputs, options: StepOptions) -> int | None:
    """How many of a slot's programs want one, or None if none does."""
    _, _, H, HV, K, V = inputs.sizes
    _, tile = tile_of(K, V)
    shared_window = inputs.conv_state is not None and (HV > H or tile.BV < V)
    if not shared_window and not _shares_norm(inputs, options):
        return None
    return H + HV * V // options.norm_group_size


def _shares_norm(inputs: StepInputs, options: StepOptions) -> bool:
    *_, K, V = inputs.sizes
    return options.norm_eps is not None and (
        options.norm_group_size != V or tile_of(K, V)[1].BV < V
    )


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x [B, T, ...] with what belongs to a token in a row, and the way to the next token."""
    if x is None:
        return None, 0
    size = 1
    for n, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:])):
        if n != 1 and stride != size:
            x = x.contiguous()
            break
        size *= n
    B, T = x.shape[:2]
    if T == 1:
        return x, x.stride(0)
    if B > 1 and x.stride(0) != T * x.stride(1):
        x = x.contiguous()
    return x, x.stride(1)


def _tensors(out: Tensor, inputs: StepInputs) -> dict[str, Any]:
    """Pointers and, of what has rows of tokens, the way to the next token."""
    of_tokens = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "write", "z")}
    rows = {name: _rows(x) for name, x in (of_tokens | {"y": out}).items()}
    whole = {
        "index_ptr": inputs.state_indices,
        "accepted_ptr": inputs.num_accepted,
        "conv_weight_ptr": inputs.conv_weight,
        "conv_bias_ptr": inputs.conv_bias,
        "A_ptr": inputs.A_log,
        "dt_bias_ptr": inputs.dt_bias,
        "D_ptr": inputs.D,
        "norm_weight_ptr": inputs.norm_weight,
    }
    return {
        **{f"{name}_ptr": x for name, (x, _) in rows.items()},
        **{f"row_{name}": row for name, (_, row) in rows.items()},
        **{name: None if x is None else x.contiguous() for name, x in whole.items()},
    }


def _pools(inputs: StepInputs) -> dict[str, Any]:
    """The tensors written in place: pointers, sizes and strides."""
    state, window = inputs.state, inputs.conv_state
    return {
        "state_ptr": state,
        "window_ptr": window,
        "cache_slots": state.shape[0],
        "length": 0 if window is None else window.shape[2],
        "stride_state": state.stride(0),
        "stride_head": state.stride(1),
        "stride_window": 0 if window is None else window.stride(0),
        "stride_c": 0 if window is None else window.stride(1),
        "stride_l": 0 if window is None else window.stride(2),
    }


def _gate(inputs: StepInputs, options: StepOptions) -> str:
    """The activation of the gate."""
    if options.lower_bound is not None:
        return "sigmoid"
    if options.gate_logit_normalizer is not None:
        return "logsigmoid"
    if inputs.A_log is None:
        return "log"
    return "rate" if options.a_is_rate else "softplus"


def _options(options: StepOptions) -> dict[str, Any]:
    normalizer = options.gate_logit_normalizer
    return {
        "scale": options.scale,
        "eps": 0.0 if options.norm_eps is None else options.norm_eps,
        "lower_bound": 0.0 if options.lower_bound is None else options.lower_bound,
        "normalizer": 1.0 if normalizer is None else normalizer,
        "dt_min": options.dt_min,
        "dt_max": options.dt_max,
        "pending": options.pending,
        "GROUP": options.norm_group_size,
        "V_FIRST": options.state_v_first,
        "V_CHANNELS_FIRST": options.channel_order == "vkq",
        "CONV_SILU": options.conv_silu,
        "DT_SCALES_V": options.dt_scales_v,
        "BETA_SIGMOID": options.use_beta_sigmoid,
        "BETA_FACTOR": 2.0 if options.allow_neg_eigval else 1.0,
        "L2_NORM": options.qk_l2norm,
        "NORM": options.norm_eps is not None,
        "NORM_BEFORE_GATE": options.norm_before_gate,
        "Z_SILU": options.z_silu,
    }


def arguments(
    out: Tensor, inputs: StepInputs, counter: Tensor | None, options: StepOptions
) -> dict[str, Any]:
    """What kernels of a token and of drafts are given."""
    weight = inputs.norm_weight
    return {
        **_tensors(out, inputs),
        **_pools(inputs),
        **_options(options),
        "counter_ptr": counter,
        "W": 1 if inputs.conv_weight is None else inputs.conv_weight.shape[1],
        "GATE": _gate(inputs, options),
        "WEIGHT_PER_HEAD": weight is not None and weight.dim() == 2,
    }


def step(out: Tensor, inputs: StepInputs, counter: Tensor | None, options: StepOptions) -> None:
    """Writes y into out and the new states and windows into the pools."""
    if inputs.state_indices is not None:
        token_ids.expect_unique("state_indices", inputs.state_indices, "slot")
    if counter is None:
        counter = counters(inputs, options)
    common = arguments(out, inputs, counter, options)
    if drafts_on_sm90(inputs, options):
        from slipstream.kernels.mixer_step import sm90_kernels as sm90

        sm90.drafts(common, inputs, options)
    else:
        _tokens(common, inputs, options)
    if common["y_ptr"] is not out:
        out.copy_(common["y_ptr"])


def _in_words(inputs: StepInputs, BV: int) -> bool:
    """Whether a sequence's slot is its own number, and a 32nd of a program's share of a head's
    state whole words of 16 bytes."""
    *_, K, V = inputs.sizes
    state = inputs.state
    words = 16 // state.element_size()
    steps = (state.stride(0), state.stride(1))
    return (
        inputs.state_indices is None
        and V % BV == 0
        and K * BV % (32 * words) == 0
        and all(step % words == 0 for step in steps)
        and state.data_ptr() % 16 == 0
    )


def _tokens(common: dict[str, Any], inputs: StepInputs, options: StepOptions) -> None:
    """One token after another."""
    B, T, H, HV, K, V = inputs.sizes
    plain = options.state_v_first and inputs.conv_state is None and options.norm_eps is None
    BK, tile = tile_of(K, V, plain)
    scratch, y = None, common["y_ptr"]
    if _shares_norm(inputs, options):
        scratch = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    g, pdl = inputs.g, backends.supports_pdl(y.device)
    launch_cache.cached(mixer_step_kernel)[-(-V // tile.BV) * HV * B,](
        **common,
        scratch_ptr=scratch,
        T=T,
        HV=HV,
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=tile.BV,
        WIDTH=line_of(BK, inputs.state.dtype),
        HEADS_PER_K=HV // H,
        ONE=T == 1 and inputs.num_accepted is None,
        THREADS=32 * tile.warps,
        PER_CHANNEL=g is not None and g.dim() == 4,
        PDL=pdl,
        PREFETCH=pdl and B <= PREFETCH_ROWS and _in_words(inputs, tile.BV),
        num_warps=tile.warps,
        **({"launch_pdl": True} if pdl else {}),
        **({} if tile.registers is None or backends.INTERPRETED else {"maxnreg": tile.registers}),
    )

"""Every family of kernels: a call of its public function, and its launches in plain torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from slipstream.kernels.attention import cache, eager, latent
from slipstream.kernels.attnres import op as attnres_op
from slipstream.kernels.conv import eager as conv_plain
from slipstream.kernels.elementwise import (
    copy_states,
    decay_gate,
    embedding,
    glu,
    log_probs,
    place_tokens,
    rotary,
    token_shift,
)
from slipstream.kernels.elementwise import erase as erase_op
from slipstream.kernels.elementwise import rotation as rotation_op
from slipstream.kernels.gated_scan import eager as scan_eager
from slipstream.kernels.linear import gated_delta_product, gsa
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.matmul import eager as matmul_eager
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.norm import eager as norm_plain
from slipstream.kernels.projection_step import eager as projection_eager
from slipstream.kernels.projection_step import op as norm_op
from slipstream.kernels.running_mean import op as running_mean_op
from slipstream.kernels.selective_scan import eager as selective_eager
from slipstream.kernels.time_mix import low_rank, rwkv7, rwkv7_step, token_mix, token_mix_step
from slipstream.runtime import backends, dispatch
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.kernel_pair import KernelPair
from tests.support import kernel_calls as calls

KERNELS = "slipstream.kernels"


@dataclass(frozen=True)
class Family:
    """launches: module and name -> the same in plain torch. chooses: modules that call
    dispatch.choose, or look at INTERPRETED."""

    name: str
    call: Callable[[], list[Tensor]]
    launches: dict[str, Callable]
    chooses: tuple[str, ...] = ()

    def take_triton(self, patch: pytest.MonkeyPatch, impl: str) -> None:
        first, *rest = impl.split("|")
        plan = dispatch.Selection(first, "", fallbacks=tuple(rest))

        def choose(candidates: Any, call: Any, asked: str | None, *_: Any) -> dispatch.Selection:
            # names one implementation, as a user does; a probe that says more asks for none
            assert asked is None or "|" not in asked, asked
            return plan

        for module in self.chooses:
            found = importlib.import_module(module)
            if hasattr(found, "INTERPRETED"):
                patch.setattr(f"{module}.INTERPRETED", impl != "eager")
            elif module.endswith("attention.dispatch"):  # backends.INTERPRETED: all candidates
                patch.setattr(backends, "INTERPRETED", impl != "eager")
            elif hasattr(found, "impl_for"):  # which asks `choose` on CUDA alone
                patch.setattr(found, "impl_for", lambda x, f, asked: choose((), x, asked).impls)
            elif hasattr(found, "choose"):
                patch.setattr(found, "choose", choose)
            else:  # dispatch.choose
                own = SimpleNamespace(**{**vars(dispatch), "choose": choose})
                patch.setattr(found, "dispatch", own)


def forget_plans() -> None:
    """Those that calls have left behind, whatever their implementation."""
    for module in (
        "attention.run",
        "linear.dispatch",
        "linear.decode",
        "gated_scan.op",
        "selective_scan.op",
        "mixer_step.op",
        "time_mix.rwkv7_step",
    ):
        importlib.import_module(f"{KERNELS}.{module}")._PLANS.clear()


def in_torch(op: KernelOp | None) -> Callable:
    """The plain twin of an operator, as its kernel is called."""
    assert op is not None and isinstance(op.impl, KernelPair)
    return op.impl.plain


FAMILIES = [
    Family(
        "attnres.triton",
        calls.sampled("attnres-normed"),
        {
            "attnres.triton_kernels:forward": attnres_op._plain_forward,
            "attnres.triton_kernels:backward": attnres_op.eager_backward,
        },
        ("slipstream.kernels.attnres.op",),
    ),
    Family(
        "attention.latent",
        calls.latents,
        {"attention.triton.decode_latent:decode": latent.eager_latent_attention},
        ("slipstream.kernels.attention.latent",),
    ),
    Family(
        "attention.append", calls.append, {"attention.triton.decode_launch:append": cache.append}
    ),
    Family(
        "linear.slots",
        calls.slot_rows,
        {
            "linear.triton.gsa_softmax:softmax": gsa._eager_softmax,
            "linear.triton.gsa_softmax:softmax_backward": gsa._eager_backward,
        },
    ),
    Family(
        "linear.steps",
        calls.householder_rows,
        {
            "linear.triton.householder:interleave": gated_delta_product.eager_interleave,
            "linear.triton.householder:deinterleave": gated_delta_product.eager_deinterleave,
        },
    ),
    Family(
        "matmul.triton",
        calls.sampled("matmul"),
        {"matmul.triton_kernels:matmul": lambda t, config: matmul_eager.matmul(t)},
        ("slipstream.kernels.matmul.op",),
    ),
    Family(
        "linear_kl_div.triton",
        calls.sampled("linear_kl_div"),
        {"loss.triton.kl_div:linear_rows": calls.kl_rows},
        ("slipstream.ops.loss",),
    ),
    Family(
        "log_probs.triton",
        calls.sampled("linear_log_probs-entropy"),
        {
            "elementwise.triton.log_probs:forward": log_probs.plain,
            "elementwise.triton.log_probs:backward": log_probs._plain_backward,
        },
        ("slipstream.ops.loss",),
    ),
    Family(
        "cross_entropy.shard",
        calls.shards,
        {"loss.triton.cross_entropy:cross_entropy": calls.sharded},
    ),
    Family(
        "embedding.triton",
        calls.rows_of_table,
        {"elementwise.triton.embedding:gather": lambda i, w: embedding._nearest(i, w)},
    ),
    Family(
        "linear.triton none",
        calls.sampled("chunk_retention"),
        {f"linear.triton.scalar_decay.backend:{k}": v for k, v in calls.LINEAR.items()},
    ),
    Family(
        "linear.triton delta",
        calls.sampled("chunk_delta_rule"),
        {f"linear.triton.delta.backend:{k}": v for k, v in calls.LINEAR.items()},
    ),
    Family(
        "linear.step",
        calls.step,
        {
            "linear.triton.decode:update": calls.update,
            "linear.triton.decode:forward": recurrent_forward,
        },
    ),
    Family(
        "decay_gate.triton",
        calls.decay_gates,
        {
            "elementwise.triton.decay_gate:forward": decay_gate.plain,
            "elementwise.triton.decay_gate:backward": calls.decay_gate_backward,
        },
        ("slipstream.kernels.elementwise.decay_gate",),
    ),
    Family(
        "erase.triton",
        calls.erased,
        {
            "elementwise.triton.erase:forward": erase_op.plain,
            "elementwise.triton.erase:backward": in_torch(erase_op._forward.backward),
        },
        ("slipstream.kernels.elementwise.erase",),
    ),
    Family(
        "rotation.triton",
        calls.rotations,
        {
            "elementwise.triton.rotation:forward": rotation_op.plain,
            "elementwise.triton.rotation:backward": in_torch(rotation_op._forward.backward),
        },
        ("slipstream.kernels.elementwise.rotation",),
    ),
    Family(
        "running_mean.triton",
        calls.running_means,
        {
            "running_mean.triton_kernels:means": in_torch(running_mean_op._mean),
            "running_mean.triton_kernels:means_backward": in_torch(running_mean_op._mean.backward),
        },
        ("slipstream.kernels.running_mean.op",),
    ),
    Family(
        "token_mix.triton",
        calls.token_mixes,
        {
            "time_mix.triton.token_mix:forward": token_mix.plain,
            "time_mix.triton.token_mix:backward": in_torch(token_mix._backward),
        },
        ("slipstream.kernels.time_mix.token_mix",),
    ),
    Family(
        "rwkv7.triton",
        calls.rwkv7_parts,
        {
            "time_mix.triton.rwkv7:terms": rwkv7.plain_terms,
            "time_mix.triton.rwkv7:terms_backward": rwkv7.terms_grads,
            "time_mix.triton.rwkv7:output": rwkv7.plain_output,
            "time_mix.triton.rwkv7:output_backward": in_torch(rwkv7._output.backward),
        },
        ("slipstream.kernels.time_mix.rwkv7",),
    ),
    Family(
        "rwkv7_step.triton",
        calls.rwkv7_steps,
        {"time_mix.triton.rwkv7_step:step": rwkv7_step.plain},
    ),
    Family(
        "low_rank_step.triton",
        calls.low_rank_products,
        {"time_mix.triton.low_rank:low_rank": low_rank.plain},
        ("slipstream.kernels.time_mix.low_rank",),
    ),
    Family(
        "token_mix_step.triton",
        calls.token_mix_steps,
        {"time_mix.triton.token_mix_step:token_mix_step": token_mix_step.plain},
        ("slipstream.kernels.time_mix.token_mix_step",),
    ),
    Family(
        "projection_step.triton",
        calls.projections,
        {"projection_step.triton_kernels:projection_step": projection_eager.projection_step},
    ),
    Family(
        "projection_norm_step.triton",
        calls.normed_projections,
        {"projection_step.triton_kernels:projection_norm": norm_op._norm_eager},
        ("slipstream.kernels.projection_step.op",),
    ),
    Family(
        "mixer_step.triton", calls.mixer_steps, {"mixer_step.triton.launch:step": calls.mixer_step}
    ),
    Family(
        "mixer_step.block_inputs",
        calls.inputs_of_blocks,
        {"mixer_step.triton.block_inputs:block_inputs": block_inputs._eager},
    ),
    Family(
        "place_tokens.triton",
        calls.placed_tokens,
        {"elementwise.triton.place_tokens:place_tokens": place_tokens._plain},
        ("slipstream.kernels.elementwise.place_tokens",),
    ),
    Family(
        "copy_states.triton",
        calls.copied_states,
        {"elementwise.triton.copy_states:copy_states": copy_states._eager},
        ("slipstream.kernels.elementwise.copy_states",),
    ),
    Family(
        "gated_scan.triton",
        calls.sampled("chunk_hgrn"),
        {
            "gated_scan.triton_kernels:forward": scan_eager.scan_forward,
            "gated_scan.triton_kernels:backward": scan_eager.scan_backward,
        },
    ),
    Family(
        "selective_scan.triton",
        calls.selective,
        {
            "selective_scan.triton_launch:forward": calls.selective_forward,
            "selective_scan.triton_launch:backward": selective_eager.selective_scan_backward,
        },
    ),
    Family(
        "norm.triton",
        calls.sampled("layer_norm"),
        {
            "norm.triton_launch:forward": norm_plain.forward,
            "norm.triton_launch:backward": norm_plain.backward,
        },
        ("slipstream.kernels.norm.op",),
    ),
    Family(
        "conv.triton",
        calls.sampled("short_convolution"),
        {
            "conv.triton_launch:forward": conv_plain.forward,
            "conv.triton_launch:backward": conv_plain.backward,
        },
        ("slipstream.ops.conv",),
    ),
    Family(
        "conv.update",
        calls.conv_update,
        {"conv.triton_launch:update": conv_plain.update},
        ("slipstream.ops.conv",),
    ),
    Family(
        "cross_entropy.triton", calls.sampled("cross_entropy"), calls.LOSS, ("slipstream.ops.loss",)
    ),
    Family(
        "cross_entropy.triton",
        calls.sampled("linear_cross_entropy"),
        calls.LOSS,
        ("slipstream.ops.loss",),
    ),
    Family(
        "glu.triton",
        calls.sampled("swiglu"),
        {
            "elementwise.triton.glu:glu": glu._eager,
            "elementwise.triton.glu:glu_backward": in_torch(glu.forward.backward),
        },
        ("slipstream.kernels.elementwise.glu",),
    ),
    Family(
        "glu_bwd_recompute.triton",
        calls.sampled("glu_linear"),
        {
            "elementwise.triton.glu:glu": glu._eager,
            "elementwise.triton.glu:glu_backward": in_torch(glu.forward.backward),
            "elementwise.triton.glu:glu_bwd_recompute": glu._plain_again,
        },
        ("slipstream.kernels.elementwise.glu",),
    ),
    Family(
        "token_shift.triton",
        calls.sampled("token_shift"),
        {"elementwise.triton.token_shift:shift": token_shift._eager},
        ("slipstream.kernels.elementwise.token_shift",),
    ),
    Family(
        "rotary.triton",
        calls.sampled("rotary_embedding"),
        {"elementwise.triton.rotary:rotate": rotary._eager},
        ("slipstream.ops.rotary",),
    ),
    Family(
        "attention.triton",
        calls.sampled("attention"),
        {
            "attention.triton.launch:forward": eager.forward,
            "attention.triton.launch:backward": eager.backward,
        },
        ("slipstream.kernels.attention.dispatch",),
    ),
    Family(
        "attention.decode",
        calls.decode,
        {"attention.triton.decode_launch:decode": lambda c, o: eager.forward(cache.gather(c), o)},
        ("slipstream.kernels.attention.dispatch",),
    ),
]
# Which of their arguments these write into.
WRITTEN: dict[Any, tuple[int, ...]] = {
    cache.append: (0, 1),
    calls.mixer_step: (0,),
    rwkv7_step.plain: (0,),
    block_inputs._eager: (1,),
    place_tokens._plain: tuple(range(7, 13)),
    copy_states._eager: (2,),
    gsa._eager_softmax: (1,),
    gsa._eager_backward: (1,),
    gated_delta_product.eager_deinterleave: (3,),
}

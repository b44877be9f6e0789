"""Every family of kernels: a call of its public function, and its launches in plain torch."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from slipstream.kernels.attention import cache, eager, latent
from slipstream.kernels.linear import gated_delta_product, gsa
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.matmul import op as matmul_eager
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.projection_step import op as projection_eager
from slipstream.kernels.selective_scan import eager as selective_eager
from slipstream.runtime import backends, dispatch, rows
from slipstream.runtime.kernel_pair import KernelPair
from tests.support import kernel_calls as calls

KERNELS = "slipstream.kernels"


@dataclass(frozen=True)
class Family:
    """pairs: a module whose operators are each a launch and the same in plain torch. launches:
    further ones, module and name -> the same in plain torch. chooses: a module that calls
    dispatch.choose, or looks at INTERPRETED."""

    name: str
    call: Callable[[], list[Tensor]]
    pairs: str = ""
    launches: Mapping[str, Callable] = field(default_factory=dict)
    chooses: str = ""

    def each_launch(self) -> dict[str, Callable]:
        """Module and name -> the same in plain torch."""
        found = {f"{KERNELS}.{place}": plain for place, plain in self.launches.items()}
        if self.pairs:
            made = vars(importlib.import_module(f"{KERNELS}.{self.pairs}")).values()
            operators = [*made, *(getattr(x, "backward", None) for x in made)]
            pairs = [getattr(x, "impl", x) for x in operators]
            found |= {x.kernel: x.plain for x in pairs if isinstance(x, KernelPair)}
        return found

    def take_triton(self, patch: pytest.MonkeyPatch, impl: str) -> None:
        first, *rest = impl.split("|")
        plan = dispatch.Selection(first, "", fallbacks=tuple(rest))

        def choose(candidates: Any, call: Any, asked: str | None, *_: Any) -> dispatch.Selection:
            # names one implementation, as a user does; a probe that says more asks for none
            assert asked is None or "|" not in asked, asked
            return plan

        if not self.chooses:
            return
        found = importlib.import_module(f"slipstream.{self.chooses}")
        if hasattr(found, "INTERPRETED"):
            patch.setattr(found, "INTERPRETED", impl != "eager")
        elif self.chooses.endswith("attention.dispatch"):  # backends.INTERPRETED: all candidates
            patch.setattr(backends, "INTERPRETED", impl != "eager")
        elif hasattr(found, "impl_for"):  # which asks `choose` on CUDA alone
            patch.setattr(found, "impl_for", lambda x, f, asked: choose((), x, asked).impls)
        elif hasattr(found, "choose"):
            patch.setattr(found, "choose", choose)
        else:  # dispatch.choose
            own = SimpleNamespace(**{**vars(dispatch), "choose": choose})
            patch.setattr(found, "dispatch", own)


def paired(name: str, call: Callable[[], list[Tensor]], module: str) -> Family:
    """Whose operators are in the module that chooses among their implementations."""
    return Family(f"{name}.triton", call, module, chooses=f"kernels.{module}")


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


def in_chunks(module: str) -> dict[str, Callable]:
    return {f"linear.triton.{module}.backend:{name}": f for name, f in calls.LINEAR.items()}


FAMILIES = [
    paired("attnres", calls.sampled("attnres-normed"), "attnres.op"),
    *(
        Family(
            f"hyper_connection.{x}",
            calls.sampled(f"mhc_{x}"),
            "hyper_connection.op",
            chooses="kernels.hyper_connection.op",
        )
        for x in ("pre", "post")
    ),
    paired("selected_attention", calls.sampled("attention-selected"), "selected_attention.op"),
    Family("indexer", calls.indexed, "indexer.op", chooses="kernels.indexer.op"),
    Family(
        "attention.latent",
        calls.latents,
        launches={"attention.triton.decode_latent:decode": latent.eager_latent_attention},
        chooses="kernels.attention.latent",
    ),
    Family(
        "attention.append",
        calls.append,
        launches={"attention.triton.decode_launch:append": cache.append},
    ),
    Family(
        "linear.slots",
        calls.slot_rows,
        launches={
            "linear.triton.gsa_softmax:softmax": gsa._eager_softmax,
            "linear.triton.gsa_softmax:softmax_backward": gsa._eager_backward,
        },
    ),
    Family(
        "linear.steps",
        calls.householder_rows,
        launches={
            "linear.triton.householder:interleave": gated_delta_product.eager_interleave,
            "linear.triton.householder:deinterleave": gated_delta_product.eager_deinterleave,
        },
    ),
    Family(
        "matmul.triton",
        calls.sampled("matmul"),
        launches={"matmul.triton_kernels:matmul": lambda t, config: matmul_eager.plain_matmul(t)},
        chooses="kernels.matmul.op",
    ),
    Family(
        "linear_kl_div.triton",
        calls.sampled("linear_kl_div"),
        launches={"loss.triton.kl_div:linear_rows": calls.kl_rows},
        chooses="ops.loss",
    ),
    Family(
        "log_probs.triton",
        calls.sampled("linear_log_probs-entropy"),
        "elementwise.log_probs",
        chooses="ops.loss",
    ),
    Family(
        "cross_entropy.shard",
        calls.shards,
        launches={"loss.triton.cross_entropy:cross_entropy": calls.sharded},
    ),
    Family("embedding.triton", calls.rows_of_table, "elementwise.embedding"),
    Family(
        "linear.triton none", calls.sampled("chunk_retention"), launches=in_chunks("scalar_decay")
    ),
    Family("linear.triton delta", calls.sampled("chunk_delta_rule"), launches=in_chunks("delta")),
    Family(
        "linear.step",
        calls.step,
        launches={
            "linear.triton.decode:update": calls.update,
            "linear.triton.decode:forward": recurrent_forward,
        },
    ),
    paired("decay_gate", calls.decay_gates, "elementwise.decay_gate"),
    paired("mamba_terms", calls.terms_of_mamba, "elementwise.mamba_terms"),
    paired("erase", calls.erased, "elementwise.erase"),
    paired("rotation", calls.rotations, "elementwise.rotation"),
    paired("running_mean", calls.running_means, "running_mean.op"),
    paired("token_mix", calls.token_mixes, "time_mix.token_mix"),
    paired("rwkv7", calls.rwkv7_parts, "time_mix.rwkv7"),
    Family("rwkv7_step.triton", calls.rwkv7_steps, "time_mix.rwkv7_step"),
    paired("low_rank_step", calls.low_rank_products, "time_mix.rwkv7_step"),
    paired("token_mix_step", calls.token_mix_steps, "time_mix.token_mix"),
    Family(
        "projection_step.triton",
        calls.projections,
        launches={
            "projection_step.triton_kernels:projection_step": projection_eager.projection_step
        },
    ),
    paired("projection_norm_step", calls.normed_projections, "projection_step.op"),
    Family("mixer_step.triton", calls.mixer_steps, "mixer_step.op"),
    Family(
        "mixer_step.block_inputs",
        calls.inputs_of_blocks,
        launches={"mixer_step.triton.block_inputs:block_inputs": block_inputs._eager},
    ),
    paired("place_tokens", calls.placed_tokens, "elementwise.place_tokens"),
    paired("copy_states", calls.copied_states, "elementwise.copy_states"),
    Family(
        "row_sums.triton",
        calls.summed_rows,
        launches={"elementwise.triton.row_sums:row_sums": rows._plain},
        chooses="runtime.rows",
    ),
    Family("gated_scan.triton", calls.sampled("chunk_hgrn"), "gated_scan.op"),
    Family(
        "selective_scan.triton",
        calls.selective,
        launches={
            "selective_scan.triton_launch:forward": calls.selective_forward,
            "selective_scan.triton_launch:backward": selective_eager.selective_scan_backward,
        },
    ),
    paired("norm", calls.sampled("layer_norm"), "norm.op"),
    Family("conv.triton", calls.sampled("short_convolution"), "conv.op", chooses="ops.conv"),
    Family("conv.update", calls.conv_update, "conv.op", chooses="ops.conv"),
    Family(
        "cross_entropy.triton",
        calls.sampled("cross_entropy"),
        launches=calls.LOSS,
        chooses="ops.loss",
    ),
    Family(
        "cross_entropy.triton",
        calls.sampled("linear_cross_entropy"),
        launches=calls.LOSS,
        chooses="ops.loss",
    ),
    paired("glu", calls.sampled("swiglu"), "elementwise.glu"),
    paired("glu_bwd_recompute", calls.sampled("glu_linear"), "elementwise.glu"),
    paired("token_shift", calls.sampled("token_shift"), "elementwise.token_shift"),
    Family(
        "rotary.triton",
        calls.sampled("rotary_embedding"),
        "elementwise.rotary",
        chooses="ops.rotary",
    ),
    Family(
        "attention.triton",
        calls.sampled("attention"),
        launches={
            "attention.triton.launch:forward": eager.forward,
            "attention.triton.launch:backward": eager.backward,
        },
        chooses="kernels.attention.dispatch",
    ),
    Family(
        "attention.decode",
        calls.decode,
        launches={
            "attention.triton.decode_launch:decode": lambda c, o: eager.forward(cache.gather(c), o)
        },
        chooses="kernels.attention.dispatch",
    ),
]

"""SGLang's linear attention by slipstream: the calls of its GDN and KDA kernels, a registration.

    from slipstream.integrations import sglang

    sglang.register(MyConfig, ["MyModelForCausalLM"], "kda")

Written for SGLang 0.5.23, which is imported where it is needed. Its registry of external models
(sglang.srt.configs.linear_attn_model_registry) names a backend class for each config; that of
slipstream is SGLang's own with these kernels in it. Models that SGLang knows by itself do not ask
the registry: there, subclass GDNAttnBackend as `_backend` does.

Not taken: trees of drafts, which stay with SGLang's Triton kernel, its ring caches (ReplaySSM), and
for KDA the states on the way that its "extra_buffer" strategy for prefixes reads.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.integrations.serving import (
    prefill,
    prefill_with_states,
    step,
    step_drafts,
    unpacked,
)
from slipstream.ops import chunk_gated_delta_rule, chunk_kda

__all__ = ["GDNKernel", "KDAKernel", "register"]
KINDS = {"gdn": "GDNAttnBackend", "kda": "KDAAttnBackend"}
_REGISTRY = "sglang.srt.configs.linear_attn_model_registry"


class _Kernel:
    """Properties that SGLang's dispatchers read of a kernel."""

    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = False
    supports_packed_decode = True
    supports_packed_decode_safe_gate = True

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        lower_bound: float | None = None,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        """One token of each sequence: q, k [1, N, H, K], v [1, N, HV, V], raw gates a [N, HV] or of
        KDA [N, HV K], b [N, HV]; ssm_states [slots, HV, V, K] by cache_indices [N], below 0 for
        none. Returns o [1, N, HV, V]."""
        if any(others.get(f"replayssm_{name}") is not None for name in ("d", "k", "g")):
            raise NotImplementedError("replayssm: slipstream keeps no ring of records for SGLang")
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        o = step(
            q,
            k,
            v,
            *self._gates(a, b, v, ssm_states),
            A_log=A_log,
            dt_bias=dt_bias,
            states=ssm_states,
            slots=cache_indices,
            lower_bound=lower_bound,
            scale=scale,
        )
        return o.transpose(0, 1)

    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        **options: Any,
    ) -> Tensor:
        """decode, with its options, of what the convolution returns [N, 2 H K + HV V]."""
        K, values = ssm_states.shape[-1], num_v_heads * head_v_dim
        keys = (mixed_qkv.shape[-1] - values) // 2
        widths = (K, K, head_v_dim)
        q, k, v = (
            x.unflatten(-1, (-1, width))[None]
            for x, width in zip(mixed_qkv.split([keys, keys, values], -1), widths)
        )
        return self.decode(q, k, v, a, b, ssm_states=ssm_states, **options)

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        intermediate_states_buffer: Tensor,
        intermediate_state_indices: Tensor,
        cache_steps: int,
        retrieve_parent_token: Tensor | None = None,
        lower_bound: float | None = None,
        **others: Any,
    ) -> Tensor:
        """A chain of cache_steps drafts of each sequence, packed: ssm_states stay as they are, and
        intermediate_states_buffer [rows, steps, HV, V, K] gets the state after each draft."""
        if retrieve_parent_token is not None or others.get("cache_ring"):
            raise NotImplementedError("target_verify: want a chain of drafts, and no ring")
        buffer, rows = intermediate_states_buffer, intermediate_state_indices
        N, T = cache_indices.shape[0], cache_steps
        a, b = self._gates(a, b, v.transpose(0, 1), ssm_states)
        given = [unpacked(x, query_start_loc, T) for x in (q, k, v, a[:, 0][None], b[:, 0][None])]
        steps = rows[:N, None] * buffer.shape[1] + query_start_loc.new_tensor(range(T))
        o = step_drafts(
            given,
            states=ssm_states,
            slots=cache_indices,
            into=buffer.flatten(0, 1),
            into_slots=steps.masked_fill(rows[:N, None] < 0, -1),
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )
        return o.reshape(1, N * T, *o.shape[2:])

    def _gates(self, a: Tensor, b: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """a [tokens, 1, HV] and b [tokens, 1, HV]"""
        shape = v.shape[0], 1, v.shape[2]
        return a.reshape(shape), b.reshape(shape)


class GDNKernel(_Kernel):
    """SGLang's calls of Gated DeltaNet: decode, drafts in a chain, prefill."""

    uses_state_checkpoints = True

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        inplace_update: bool = True,
        num_state_checkpoints: int = 0,
        state_checkpoint_every_n_tokens: int = 0,
        **others: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        """Packed prompts [1, T, ...] with log decays g and beta [1, T, HV]; states are read and
        written by cache_indices. Returns o, None, and, if asked for, the states at the checkpoints
        of each sequence [1, checkpoints, HV, V, K]."""
        tensors = q, k, v, g, beta
        options: dict[str, Any] = {"states": ssm_states, "slots": cache_indices}
        options |= {"cu_seqlens": query_start_loc, "use_qk_l2norm_in_kernel": True}
        if num_state_checkpoints:
            options |= {"every": state_checkpoint_every_n_tokens, "count": num_state_checkpoints}
            o, h = prefill_with_states(chunk_gated_delta_rule, *tensors, **options)
            return o, None, h[None]
        o = prefill(chunk_gated_delta_rule, *tensors, in_place=inplace_update, **options)
        return o, None, None


class KDAKernel(_Kernel):
    """SGLang's calls of KDA: decode, drafts in a chain, prefill."""

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        return_intermediate_states: bool = False,
        **others: Any,
    ) -> Tensor:
        """As GDNKernel's, of g [1, T, HV, K], raw if A_log is given; returns o alone."""
        if return_intermediate_states or others.get("track_state") is not None:
            raise NotImplementedError("return_intermediate_states: slipstream keeps no such states")
        raw: dict[str, Any] = {}
        if A_log is not None:
            bias = None if dt_bias is None else dt_bias.reshape(-1)
            raw = {"use_gate_in_kernel": True, "A_log": A_log.reshape(-1), "dt_bias": bias}
            raw["lower_bound"] = lower_bound
        return prefill(
            chunk_kda,
            q,
            k,
            v,
            g.reshape(*v.shape[:3], q.shape[-1]),
            beta.reshape(v.shape[:3]),
            states=ssm_states,
            slots=cache_indices,
            cu_seqlens=query_start_loc,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=beta_is_raw,
            **raw,
        )

    def _gates(self, a: Tensor, b: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = v.shape[0], 1, v.shape[2]
        return a.reshape(*shape, states.shape[-1]), b.reshape(shape)


def register(config_class: type, arch_names: Sequence[str], kind: str, **options: Any) -> None:
    """Tells SGLang to run a model's linear attention layers by slipstream.

    Args:
        config_class: of the model. arch_names: its architectures. kind: "gdn" or "kda".
        options: further fields of SGLang's LinearAttnModelSpec.

    Raises:
        ValueError: another kind. ImportError: there is no SGLang.
    """
    from importlib import import_module

    if kind not in KINDS:
        raise ValueError(f"kind: want one of {', '.join(KINDS)}, got {kind!r}")
    registry = import_module(_REGISTRY)
    registry.register_linear_attn_model(
        registry.LinearAttnModelSpec(
            config_class=config_class,
            backend_class_name=f"{__name__}.{KINDS[kind]}",
            arch_names=list(arch_names),
            **options,
        )
    )


def __getattr__(name: str) -> Any:
    """GDNAttnBackend and KDAAttnBackend, which SGLang imports by name."""
    for kind, known in KINDS.items():
        if name == known:
            return _backend(kind, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _backend(kind: str, name: str) -> type:
    """SGLang's class of this name, with the kernels of a chain of drafts replaced."""
    from importlib import import_module

    module = import_module(f"sglang.srt.layers.attention.linear.{kind}_backend")
    base: Any = getattr(module, name)

    class Backend(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kernel = GDNKernel() if kind == "gdn" else KDAKernel()
            dispatcher: Any = self.kernel_dispatcher
            dispatcher.decode_kernel = dispatcher.extend_kernel = kernel
            dispatcher.verify_kernel = kernel
            dispatcher.supports_packed_decode = True

    Backend.__name__ = name
    return Backend

"""SGLang's linear attention by slipstream: the calls of its GDN and KDA kernels, registrations.

    from slipstream.integrations import sglang

    sglang.register_builtin()                                    # its own models
    sglang.register(MyConfig, ["MyModelForCausalLM"], "kda")     # a model of yours

Written for SGLang 0.5.16 to 0.5.23, which is imported where it is needed. A backend of slipstream
is SGLang's own class with these kernels in it. SGLang's hooks (sglang.srt.plugins) put it in the
place of theirs; its registry of external models names one for each config.

Not taken: ring caches (ReplaySSM), trees of drafts, and checkpoints of states other than the ones
that a prefix's snapshot or the table of chunks asks for. A call that asks for one is refused by the
name of its argument, and in a backend SGLang's own kernel takes it.
"""

import functools
import logging
from collections.abc import Sequence
from importlib import import_module
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from slipstream.integrations import serving, sglang_functions, usage
from slipstream.ops import chunk_gated_delta_rule, chunk_kda

__all__ = ["GDNKernel", "KDAKernel", "register", "register_builtin"]
KINDS = {"gdn": "GDNAttnBackend", "kda": "KDAAttnBackend"}
# what a dispatcher of SGLang has the kernel of a method in
_PLACES = {
    "decode": "decode_kernel",
    "packed_decode": "decode_kernel",
    "extend": "extend_kernel",
    "target_verify": "verify_kernel",
}
_registering = Lock()
logger = logging.getLogger(__name__)
_REGISTRY = "sglang.srt.configs.linear_attn_model_registry"
_HOOKS = "sglang.srt.plugins.hook_registry"
_BACKENDS = "sglang.srt.layers.attention.linear"
# arguments without effect here: they repeat what others say, or serve SGLang's own kernels
_HINTS = frozenset(
    {"chunk_indices", "chunk_offsets", "extend_prefix_lens", "extend_seq_lens_cpu", "layer_id",
     "output", "state_checkpoint_every_n_tokens", "track_ssm_h_batch_src"}
)  # fmt: skip


def _refuse(others: dict[str, Any]) -> None:
    """Raises NotImplementedError for an argument that asks for something."""
    for name, value in others.items():
        if name not in _HINTS and (isinstance(value, Tensor) or value):
            raise NotImplementedError(f"{name}: slipstream has no such call of SGLang's kernels")


class _Kernel:
    """Properties that SGLang's dispatchers read of a kernel."""

    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate = True
    supports_safe_gate_verify = True

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
        query_start_loc: Tensor | None = None,
        lower_bound: float | None = None,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        """One token of each sequence: q, k [1, N, H, K], v [1, N, HV, V], raw gates a [N, HV] or of
        KDA [N, HV K], b [N, HV]; ssm_states [slots, HV, V, K] by cache_indices [N], below 0 for
        none. query_start_loc has no effect. Returns o [1, N, HV, V]."""
        _refuse(others)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        o = serving.step(
            q,
            k,
            v,
            *self._gates(a, b, v, ssm_states),
            A_log=A_log,
            dt_bias=dt_bias,
            states=ssm_states,
            slots=sglang_functions.own_slots(cache_indices),
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
        # the class's: behind an instance's stands SGLang's decode, but what is refused, such as a
        # ring cache, is to reach SGLang's packed_decode
        return _Kernel.decode(self, q, k, v, a, b, ssm_states=ssm_states, **options)

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
        stable_rows: bool = False,
        **others: Any,
    ) -> Tensor:
        """A chain of at most cache_steps drafts of each sequence, packed: ssm_states stay as they
        are, and intermediate_states_buffer [rows, steps, HV, V, K] gets the state after each draft,
        in the rows intermediate_state_indices whether or not stable_rows asks for these."""
        buffer, N, T = intermediate_states_buffer, query_start_loc.shape[0] - 1, cache_steps
        rows = intermediate_state_indices[:N, None]
        _refuse({"retrieve_parent_token": retrieve_parent_token, **others})
        a, b = self._gates(a, b, v.transpose(0, 1), ssm_states)
        drafts = torch.arange(T, device=rows.device)
        is_draft = drafts < query_start_loc.diff()[:, None]
        o = serving.step_drafts(
            [
                serving.unpacked(x, query_start_loc, T)
                for x in (q, k, v, a[:, 0][None], b[:, 0][None])
            ],
            states=ssm_states,
            slots=cache_indices[:N],
            into=buffer.flatten(0, 1),
            into_slots=torch.where(is_draft, rows * buffer.shape[1] + drafts, -1),
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )
        return serving.packed(o, query_start_loc, q.shape[1])

    def _extend(
        self,
        rule: Any,
        *tensors: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        in_place: bool,
        all_states: bool,
        track_state: Tensor | None,
        track_chunk_idx: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """o, and with all_states those before every 64 tokens [1, chunks, HV, V, K] in float32. To
        track_state [N, HV, V, K] goes the state before chunk track_chunk_idx of each sequence."""
        T, into, rows = tensors[0].shape[1], track_state, None
        if into is not None and track_chunk_idx is not None:
            rows = serving.rows_of_chunks(track_chunk_idx, query_start_loc, T)
        elif all_states:
            count = T // 64 + query_start_loc.shape[0] - 1
            into = ssm_states.new_empty(count, *ssm_states.shape[1:], dtype=torch.float32)
            rows = serving.rows_of_starts(query_start_loc, T)
        # states on the way are left without gradients alone
        with torch.set_grad_enabled(torch.is_grad_enabled() and rows is None):
            o = serving.prefill(
                rule,
                *tensors,
                states=ssm_states,
                slots=cache_indices,
                cu_seqlens=query_start_loc,
                in_place=in_place,
                into=into,
                rows=rows,
                use_qk_l2norm_in_kernel=True,
                **options,
            )
        return o, into[None] if into is not None and track_state is None else None

    def _gates(self, a: Tensor, b: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """a [tokens, 1, HV] and b [tokens, 1, HV]"""
        shape = v.shape[0], 1, v.shape[2]
        return a.reshape(shape), b.reshape(shape)


class GDNKernel(_Kernel):
    """SGLang's calls of Gated DeltaNet: decode, drafts in a chain, prefill."""

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
        inplace_update: bool | None = None,
        num_state_checkpoints: int | None = None,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        """Packed prompts [1, T, ...] with log decays g and beta [1, T, HV]; states are read and
        written by cache_indices.

        Args:
            inplace_update: False leaves the states as they are.
            num_state_checkpoints: 0. Neither it nor inplace_update is there in SGLang 0.5.16, which
                reads the states before every 64 tokens of each prefill.
            track_state, track_chunk_idx: of each sequence the state before that chunk of 64 tokens
                goes to its row in track_state [N, HV, V, K], if it is not below 0.

        Returns:
            o, None, and for 0.5.16 the states [1, chunks, HV, V, K].
        """
        _refuse({"num_state_checkpoints": num_state_checkpoints, **others})
        o, h = self._extend(
            chunk_gated_delta_rule,
            q,
            k,
            v,
            g,
            beta,
            ssm_states=ssm_states,
            cache_indices=cache_indices,
            query_start_loc=query_start_loc,
            in_place=inplace_update is not False,
            all_states=inplace_update is None and num_state_checkpoints is None,
            track_state=track_state,
            track_chunk_idx=track_chunk_idx,
        )
        return o, None, h


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
        is_spec_decode: bool = False,
        return_intermediate_states: bool = False,
        track_ssm_h_src: Tensor | None = None,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """As GDNKernel's, of g [1, T, HV, K], raw if A_log is given.

        Args:
            is_spec_decode: no effect: states move on in place, as by SGLang's Triton kernel.
            track_ssm_h_src: if it is empty, the states of return_intermediate_states are not read.

        Returns:
            o; with return_intermediate_states also the states [1, chunks, HV, V, K], or None where
            they are not read, or track_state is there for them.
        """
        _refuse(others)
        raw: dict[str, Any] = {}
        if A_log is not None:
            bias = None if dt_bias is None else dt_bias.reshape(-1)
            raw = {"use_gate_in_kernel": True, "A_log": A_log.reshape(-1), "dt_bias": bias}
            raw["lower_bound"] = lower_bound
        is_read = track_ssm_h_src is None or track_ssm_h_src.numel() > 0
        o, h = self._extend(
            chunk_kda,
            q,
            k,
            v,
            g.reshape(*v.shape[:3], q.shape[-1]),
            beta.reshape(v.shape[:3]),
            ssm_states=ssm_states,
            cache_indices=cache_indices,
            query_start_loc=query_start_loc,
            in_place=True,
            all_states=return_intermediate_states and is_read,
            track_state=track_state,
            track_chunk_idx=track_chunk_idx,
            use_beta_sigmoid_in_kernel=beta_is_raw,
            **raw,
        )
        return (o, h) if return_intermediate_states else o

    def _gates(self, a: Tensor, b: Tensor, v: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = v.shape[0], 1, v.shape[2]
        return a.reshape(*shape, states.shape[-1]), b.reshape(shape)


def register(config_class: type, arch_names: Sequence[str], kind: str, **options: Any) -> None:
    """Tells SGLang to run the linear attention layers of a model that is not its own by slipstream.

    Args:
        config_class: of the model. arch_names: its architectures. kind: "gdn" or "kda".
        options: further fields of SGLang's LinearAttnModelSpec.

    Raises:
        ValueError: another kind. ImportError: there is no SGLang.
    """
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


def register_builtin(*kinds: str) -> None:
    """Puts slipstream's kernels into the models that SGLang has itself, by its registry of hooks.

    slipstream_plugins calls it if it is asked. Again, and in other threads, it does nothing.

    Args:
        kinds: "gdn", "kda", "mamba2" and "lightning"; all if none is given.

    Raises:
        ValueError: another kind. ImportError, AttributeError: there is no SGLang, or it has not
            this class or function.
    """
    known = (*KINDS, *sglang_functions.KINDS)
    hooks = import_module(_HOOKS)
    registry, replace = hooks.HookRegistry, hooks.HookType.REPLACE
    with _registering:
        for kind in kinds or known:
            if kind not in known:
                raise ValueError(f"kinds: want some of {', '.join(known)}, got {kind!r}")
            try:
                if kind in KINDS:
                    at = f"{_BACKENDS}.{kind}_backend.{KINDS[kind]}"
                    wanted = [(at, _backend(kind), replace)]
                else:
                    wanted = sglang_functions.hooks(kind, replace, hooks.HookType.AROUND)
            except (AttributeError, ImportError) as error:
                usage.refuse("sglang", error)
                raise
            for target, hook, way in wanted:
                registered = [x for _, x, _ in registry._hooks.get(target, ())]
                if not any(x is hook for x in registered):
                    registry.register(target, hook, way)


def __getattr__(name: str) -> Any:
    """GDNAttnBackend and KDAAttnBackend, which SGLang imports by name."""
    for kind, known in KINDS.items():
        if name == known:
            return _backend(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# once made it is kept: by then a hook may have put it where SGLang's own was
@functools.cache
def _backend(kind: str) -> type:
    """SGLang's class of this kind, with slipstream's kernels in its dispatcher."""
    name = KINDS[kind]
    base: Any = getattr(import_module(f"{_BACKENDS}.{kind}_backend"), name)

    class Backend(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            dispatcher: Any = getattr(self, "kernel_dispatcher", None)
            places = dict.fromkeys(_PLACES.values())
            if missing := [x for x in places if not hasattr(dispatcher, x)]:
                why = f"its dispatcher has no {', '.join(missing)}"
                logger.warning("slipstream: SGLang's own %s runs: %s", name, why)
                usage.refuse("sglang", f"{name}: {why}")
                return
            kernel = GDNKernel() if kind == "gdn" else KDAKernel()
            for method, place in _PLACES.items():
                where = "sglang", f"{name}.{method.removeprefix('packed_')}"
                usage.site(*where)
                theirs = getattr(getattr(dispatcher, place), method, None)
                ours = usage.counted(*where)(getattr(kernel, method))
                setattr(kernel, method, sglang_functions.or_theirs(ours, theirs))
            for place in places:
                setattr(dispatcher, place, kernel)
            # what SGLang has read of the kernels that were there before
            dispatcher.supports_packed_decode = True
            dispatcher.supports_packed_decode_safe_gate = True
            self._fused_chain_verify_fn = None

    Backend.__name__ = Backend.__qualname__ = name
    return Backend

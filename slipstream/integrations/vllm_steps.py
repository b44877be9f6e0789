"""What vLLM's layers do in one launch when every sequence of a batch has one token: mixer_step on
vLLM's pools, the convolution in it, and the norm where vLLM's operator has its gates.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.integrations import serving, usage, vllm_calls
from slipstream.ops import chunk_kda, mixer_step, rms_norm_gated
from slipstream.runtime.guarded_launch import is_capturing

PROMPT = 64  # tokens of a prompt that warms up
_WARM: set[Any] = set()  # kinds of layers that have had theirs
forward_context: Any = import_module("vllm.forward_context")
mamba_utils: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils")


def counted(name: str, step: Callable[..., None]) -> Callable[..., None]:
    usage.site("vllm", f"{name}.decode")
    return usage.counted("vllm", f"{name}.decode")(step)


def stepped(layer: Any, step: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Whether this is a batch in which every sequence has one token, and the step took it."""
    metadata = _metadata(layer)
    if not _decodes(metadata):
        return False
    try:
        step(layer, metadata, *args, **kwargs)
    except NotImplementedError:
        return False
    return True


def warm_up(layer: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Takes two prompts through a method that decodes now, once for each kind of layer.

    vLLM runs a batch that decodes before it captures graphs, and so before requests come: what
    prompts need is compiled then, and for other sizes in the background. Their block is 0, which is
    nobody's.
    """
    metadata, tensors = _metadata(layer), [x for x in (*args, *kwargs.values()) if x is not None]
    rows = max(x.shape[0] for x in tensors)
    # a layer has no pools when vLLM asks how much memory is left for them, and of one row it is not
    # said which dimension is that of tokens
    if not _decodes(metadata) or rows == 1 or is_capturing(tensors[0].device):
        return
    key = type(layer), *((x.shape[1:], x.dtype) for x in layer.kv_cache)
    if key in _WARM:
        return
    _WARM.add(key)

    def of_prompts(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        begin, end = ((), x.shape[1:]) if x.shape[0] == rows else (x.shape[:1], x.shape[2:])
        return x.new_zeros(*begin, 2 * PROMPT, *end)

    context = forward_context.get_forward_context()
    before = context.attn_metadata
    try:
        for has_state in (False, True):
            prompts = _two_prompts(metadata, tensors[0].device, has_state)
            context.attn_metadata = {**before, layer.prefix: prompts}
            method(*map(of_prompts, args), **{name: of_prompts(x) for name, x in kwargs.items()})
    # prompts are served without, but the first of them waits for its kernels
    except Exception as error:
        usage.refuse(f"vllm {type(layer).__name__}, prompts ahead of requests", error)
    finally:
        context.attn_metadata = before


def _two_prompts(metadata: Any, device: torch.device, has_state: bool) -> Any:
    """The metadata of a batch that decodes, for two prompts of PROMPT tokens."""
    offsets = torch.arange(0, 3 * PROMPT, PROMPT, dtype=torch.int32, device=device)
    blocks, has = torch.zeros_like(offsets[:2]), offsets[:2] < 0
    # names of Gated DeltaNet's and of Mamba's, of 0.26 and 0.33
    fields = {
        "num_prefills": 2, "num_prefill_tokens": 2 * PROMPT, "num_actual_tokens": 2 * PROMPT,
        "num_decodes": 0, "num_decode_tokens": 0, "prep_initial_states": has_state,
        **dict.fromkeys(("has_initial_state", "prefill_has_initial_state"), has ^ has_state),
        "has_initial_states_p": has ^ has_state,
        **dict.fromkeys(("non_spec_query_start_loc", "prefill_query_start_loc"), offsets),
        "query_start_loc_p": offsets,
        **dict.fromkeys(("non_spec_state_indices_tensor", "prefill_state_indices"), blocks),
        "state_indices_tensor_p": blocks,
    }  # fmt: skip
    known = {x.name for x in dataclasses.fields(metadata)}
    return dataclasses.replace(metadata, **{n: x for n, x in fields.items() if n in known})


def _metadata(layer: Any) -> Any:
    of_layers = forward_context.get_forward_context().attn_metadata
    return of_layers.get(layer.prefix) if isinstance(of_layers, dict) else None


def _decodes(metadata: Any) -> bool:
    if metadata is None or metadata.num_prefills or not metadata.num_decodes:
        return False
    drafts = "spec_sequence_masks" if hasattr(metadata, "spec_sequence_masks") else (
        "num_accepted_tokens"
    )  # fmt: skip
    return getattr(metadata, drafts) is None


def _step(
    layer: Any,
    slots: Tensor,
    parts: Sequence[Tensor],
    heads: tuple[int, int, int, int],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    **options: Any,
) -> None:
    """mixer_step of q, k and v, [N, channels] each, of heads H, HV, K, V, on the layer's pools."""
    if activation not in vllm_calls.ACTIVATIONS:
        raise NotImplementedError(f"activation: got {activation!r}")
    windows, states = layer.kv_cache[:2]
    windows = windows if mamba_utils.is_conv_state_dim_first() else windows.mT
    weight = weight.view(-1, weight.shape[-1])
    (H, HV, K, V), (q, k, v) = heads, parts
    # block 0 is of no sequence: it is below the pool that begins behind it
    mixer_step(
        q.unflatten(-1, (H, K))[:, None],
        k.unflatten(-1, (H, K))[:, None],
        v.unflatten(-1, (HV, V))[:, None],
        state=states[1:],
        state_indices=slots - 1,
        conv_state=windows[1:, :, : weight.shape[1] - 1],
        conv_weight=weight,
        conv_bias=bias,
        conv_activation=activation,
        state_v_first=True,
        **options,
    )


def delta_net_step(
    layer: Any, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor,
    **norm: Any,
) -> None:  # fmt: skip
    """Of Qwen's and OLMo's Gated DeltaNet."""
    n, K, (HV, V) = metadata.num_actual_tokens, layer.head_k_dim, core_attn_out.shape[-2:]
    H = (mixed_qkv.shape[-1] - HV * V) // (2 * K)
    slots, conv = metadata.non_spec_state_indices_tensor[:n], layer.conv1d
    given = slots, mixed_qkv[:n].split([H * K, H * K, HV * V], -1), (H, HV, K, V)
    _step(
        layer,
        *(*given, conv.weight, conv.bias, layer.activation),
        g=a[:n, None],
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        beta=b[:n, None],
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        use_qk_l2norm_in_kernel=True,
        out=core_attn_out[:n, None],
        **{x: t[:n, None] if x == "z" else t for x, t in norm.items()},
    )


def delta_attention_step(
    layer: Any,
    metadata: Any,
    g1: Tensor,
    beta: Tensor,
    core_attn_out: Tensor,
    mixed_qkv: Tensor | None = None,
    g2: Tensor | None = None,
    q_proj_states: Tensor | None = None,
    k_proj_states: Tensor | None = None,
    v_proj_states: Tensor | None = None,
) -> None:
    """Of Kimi's and Bailing's KDA. With q, k and v apart the convolution has three weights; beta is
    made, and so are Bailing's gates, but for a layer that norms_in_core, whose z is in
    core_attn_out."""
    n, (H, D) = metadata.num_actual_tokens, core_attn_out.shape[-2:]
    is_apart, in_core = mixed_qkv is None, getattr(layer, "norms_in_core", False)
    if is_apart:
        parts: Any = q_proj_states, k_proj_states, v_proj_states
        convolutions = [layer.q_conv1d, layer.k_conv1d, layer.v_conv1d]
        weight, bias = _behind_each_other([x.weight for x in convolutions]), convolutions[0].bias
    else:
        parts = mixed_qkv.split(H * D, -1)  # type: ignore[union-attr]
        weight, bias = layer.conv1d.weight, layer.conv1d.bias
    if bias is not None:
        raise NotImplementedError("conv1d.bias: want none")
    options: dict[str, Any] = {}
    if layer.name != "BailingMoeV3KimiDeltaAttention":
        bound = getattr(layer, "gate_lower_bound", None)
        options |= {"A_log": layer.A_log.reshape(-1), "dt_bias": layer.dt_bias.reshape(-1)}
        options["lower_bound"] = bound
    z = core_attn_out if in_core else g2
    if z is not None:
        norm = layer.o_norm
        options |= {"z": z.view(-1, H, D)[:n, None], "z_activation": norm.activation}
        options |= {"norm_weight": norm.weight, "norm_eps": norm.eps}
    slots = metadata.non_spec_state_indices_tensor[:n]
    _step(
        layer,
        *(slots, [x[:n] for x in parts], (H, H, D, D), weight, None, "silu"),
        g=g1[0, :n, None],
        beta=beta[0, :n, None],
        use_beta_sigmoid_in_kernel=in_core or not is_apart,
        use_qk_l2norm_in_kernel=True,
        out=core_attn_out[0, :n, None],
        **options,
    )


def _delta_attention_prompts(
    layer: Any, metadata: Any, g1: Tensor, beta: Tensor, core_attn_out: Tensor, **parts: Tensor
) -> None:
    """Of Kimi's KDA, whose own method waits for the device to tell which prompts have a state."""
    n, (H, D), norm = metadata.num_actual_tokens, core_attn_out.shape[-2:], layer.o_norm
    offsets, has_state = metadata.non_spec_query_start_loc, metadata.has_initial_state
    slots = vllm_calls.written(metadata.non_spec_state_indices_tensor, offsets)
    if has_state is None:  # a batch that decodes, which the step refused
        has_state = slots >= 0
    windows, states = layer.kv_cache[:2]
    windows = windows if mamba_utils.is_conv_state_dim_first() else windows.mT
    xs = [parts[f"{x}_proj_states"][:n] for x in "qkv"]
    convs = [getattr(layer, f"{x}_conv1d") for x in "qkv"]
    given = xs, windows, [x.weight[:, 0] for x in convs], [x.bias for x in convs]
    ys = vllm_calls.convolved(*given, "silu", slots, has_state, offsets)
    at = {"states": states, "slots": slots, "has_state": has_state, "cu_seqlens": offsets}
    gates = {"A_log": layer.A_log.reshape(-1), "dt_bias": layer.dt_bias, "use_gate_in_kernel": True}
    tensors = *(y.unflatten(-1, (H, D)) for y in ys), g1[:, :n], beta[:, :n].float().sigmoid()
    o = serving.prefill(chunk_kda, *tensors, **at, **gates, use_qk_l2norm_in_kernel=True)
    z = core_attn_out[:, :n]
    z.copy_(rms_norm_gated(o, z, norm.weight, eps=norm.eps, activation=norm.activation))


def _behind_each_other(weights: list[Tensor]) -> Tensor:
    """[C, W] of all of them, without a copy where they are parts of one tensor."""
    taps, at = weights[0].shape[-1], weights[0].data_ptr()
    for x in weights:
        if x.data_ptr() != at or not x.is_contiguous():
            return torch.cat(weights).view(-1, taps)
        at += x.nbytes
    return weights[0].as_strided((sum(x.shape[0] for x in weights), taps), (taps, 1))


def _mamba2_step(layer: Any, metadata: Any, projected_states: Tensor, output: Tensor) -> None:
    slots, n = metadata.state_indices_tensor_d, metadata.num_decode_tokens
    if slots.dim() == 2 and slots.shape[1] == 1:
        slots = slots[:, 0]
    if slots.dim() != 1 or getattr(layer, "use_replayssm", False):
        raise NotImplementedError("ReplaySSM, or blocks to read that are not those to write")
    P, S = layer.kv_cache[1].shape[-2:]
    inner, HV = layer.tped_intermediate_size, layer.tped_dt_size
    keys = (layer.tped_conv_size - inner) // 2
    gate, v, k, q, dt = projected_states[:n].split([inner, inner, keys, keys, HV], -1)
    norm: dict[str, Any] = {}
    if layer.norms_in_core:
        norm = {"z": gate.unflatten(-1, (HV, P))[:, None], "norm_before_gate": False}
        norm |= {"norm_weight": layer.norm.weight.view(HV, P)}
        norm |= {"norm_eps": layer.norm.variance_epsilon, "norm_group_size": layer.norm.group_size}
    conv = layer.conv1d
    _step(
        layer,
        *(slots[:n], (q, k, v), (q.shape[-1] // S, HV, S, P)),
        *(conv.weight, conv.bias, layer.activation),
        channel_order="vkq",
        g=dt[:, None],
        A=layer.A,
        dt_bias=layer.dt_bias,
        dt_scales_v=True,
        D=layer.D,
        scale=1.0,
        out=output[:n].unflatten(-1, (HV, P))[:, None],
        **norm,
    )


def delta_net(base: Any, module: Any) -> type:
    """Qwen's layer: the norm is part of vLLM's operator, which has an argument for z in it."""
    step = counted("QwenGatedDeltaNetAttention", delta_net_step)

    class QwenGatedDeltaNetAttention(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            norm = self.norm
            is_whole = norm.group_size in (None, norm.weight.numel())
            self.norms_in_core = norm.norm_before_gate and is_whole
            exporter = getattr(module, "MambaPrefillCheckpointExporter", None)
            # as vLLM's with FlashInfer's backend, for which its metadata has a plan
            if exporter is None or self.cache_config.mamba_cache_mode != "align":
                return
            config = self.vllm_config
            if module._resolve_gdn_prefill_backend(config)[1] == "flashinfer":
                self._checkpoint_alignment = module.FLASHINFER_GDN_CHECKPOINT_ALIGNMENT
                self._max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens
                self._checkpoint_exporter = exporter(state_len=self.conv_kernel_size - 1)

        def _ordered(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """What is projected as q, k, v and z, one behind the other, and b and a."""
            if not self.gqa_interleaved_layout:
                return qkvz, *self.split_ba(ba)
            n, H = qkvz.shape[0], self.num_k_heads // self.tp_size
            ordered = torch.empty_like(qkvz)
            # 16 bytes at once where heads have them: numbers of 2 take three times as long
            sixteen = math.gcd(self.head_k_dim, self.head_v_dim) * qkvz.element_size() % 16 == 0
            wide = torch.complex128 if sixteen else qkvz.dtype
            # of each head of keys: q and k, then its values and their z
            keys = 2 * self.head_k_dim
            for x, y in zip(
                qkvz.unflatten(-1, (H, -1)).tensor_split([keys], -1),
                ordered.tensor_split([H * keys], -1),
                strict=True,
            ):
                x, y = x.unflatten(-1, (2, -1)).transpose(1, 2), y.view(n, 2, H, -1)
                y.view(wide).copy_(x.view(wide))
            b, a = ba.view(n, H, 2, -1).transpose(1, 2).reshape(n, 2, -1).unbind(1)
            return ordered, b, a

        def forward_cuda(self, hidden_states: Tensor) -> Tensor:
            if getattr(self, "enable_fused_gdn_spec_decode", False) or not self.norms_in_core:
                return super().forward_cuda(hidden_states)
            qkvz, _ = self.in_proj_qkvz(hidden_states)
            ba, _ = self.in_proj_ba(hidden_states)
            heads = self.num_v_heads // self.tp_size
            # the operator writes all of it
            out = hidden_states.new_empty(hidden_states.shape[0], heads, self.head_v_dim)
            torch.ops.vllm.qwen_gdn_attention_core(
                qkvz, ba, ba, out,
                layer_name=module._encode_layer_name(self.prefix), use_aiter=True,
            )  # fmt: skip
            return self.out_proj(out.flatten(-2))[0]

        def _forward_core(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            given = mixed_qkv, b, a, core_attn_out
            warm_up(self, self._forward_core, *given)
            if not stepped(self, step, *given):
                super()._forward_core(*given)

        def _forward_core_rocm(
            self, qkvz: Tensor, ba: Tensor, z_out: Tensor, core_attn_out: Tensor
        ) -> None:
            """What the operator calls with use_aiter. z_out, which is ba here, is not written."""
            warm_up(self, self._forward_core_rocm, qkvz, ba, z_out, core_attn_out)
            qkvz, b, a = self._ordered(qkvz, ba)
            norm, gates = self.norm, core_attn_out[0].numel()
            qkv, z = qkvz.split([qkvz.shape[-1] - gates, gates], -1)
            given = qkv, b, a, core_attn_out
            z = z.view_as(core_attn_out)
            options = {"norm_weight": norm.weight, "norm_eps": norm.eps, "z": z}
            if stepped(self, step, *given, **options, z_activation=norm.activation):
                core_attn_out[_metadata(self).num_actual_tokens :].zero_()
                return
            core_attn_out.zero_()
            super()._forward_core(qkv, b.contiguous(), a.contiguous(), core_attn_out)
            if _metadata(self) is not None:
                y = rms_norm_gated(
                    core_attn_out, z, norm.weight, eps=norm.eps, activation=norm.activation
                )
                core_attn_out.copy_(y)

    return QwenGatedDeltaNetAttention


def delta_attention(base: Any, module: Any) -> type:
    """Kimi's layer: where q, k and v are apart, beta's sigmoid and the norm are part of vLLM's
    operator, whose output has the norm's gates in it before."""
    if "q_proj_states" not in inspect.signature(base._forward).parameters:
        return base
    name = "KimiGatedDeltaNetAttention"
    step = counted(name, delta_attention_step)
    prompts = usage.counted("vllm", f"{name}.chunk_kda_with_fused_gate")(_delta_attention_prompts)

    class KimiGatedDeltaNetAttention(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.norms_in_core = True
            convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
            whole = torch.cat([x.weight.data for x in convolutions])
            for x, part in zip(convolutions, whole.chunk(3), strict=True):
                x.weight.data = part

        def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
            q, k, v, beta = (getattr(self, f"{x}_proj")(hidden_states)[0] for x in "qkvb")
            gates, z = (
                getattr(self, f"{x}_b_proj")(getattr(self, f"{x}_a_proj")(hidden_states)[0])[0]
                for x in "fg"
            )
            g1, out = (x.unflatten(-1, (-1, self.head_dim))[None] for x in (gates, z))
            torch.ops.vllm.kda_attention(q, k, v, g1, beta[None], out, self.prefix)
            output[:] = self.o_proj(out[0].flatten(-2))[0]

        def _forward(self, g1: Tensor, beta: Tensor, core_attn_out: Tensor, **parts: Tensor) -> Any:
            given = {"g1": g1, "beta": beta, "core_attn_out": core_attn_out, **parts}
            warm_up(self, self._forward, **given)
            metadata = _metadata(self)
            if metadata is not None and not stepped(self, step, **given):
                prompts(self, metadata, **given)
            n = 0 if metadata is None else metadata.num_actual_tokens
            core_attn_out[:, n:].zero_()

    return KimiGatedDeltaNetAttention


def mamba2(base: Any, module: Any) -> type:
    """MambaMixer2: the norm is part of vLLM's operator, whose input has the gates in it."""
    step = counted("MambaMixer2", _mamba2_step)

    class MambaMixer2(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            groups = self.norm.n_groups
            is_local = self.tp_size == 1 or (groups > 1 and groups % self.tp_size == 0)
            self.norms_in_core = self.norm.use_rms_norm and is_local

        def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
            if not self.norms_in_core:
                return super().forward(hidden_states, mup_vector)
            projected_states, _ = self.in_proj(hidden_states)
            if mup_vector is not None:
                projected_states = projected_states * mup_vector
            output = hidden_states.new_empty(hidden_states.shape[0], self.tped_intermediate_size)
            torch.ops.vllm.mamba_mixer2(
                projected_states, output, module._encode_layer_name(self.prefix)
            )
            return self.out_proj(output)[0]

        def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
            warm_up(self, self.conv_ssm_forward, projected_states, output)
            if stepped(self, step, projected_states, output):
                return None
            result = super().conv_ssm_forward(projected_states, output)
            metadata = _metadata(self)
            if self.norms_in_core and metadata is not None:
                n = metadata.num_prefill_tokens + metadata.num_decode_tokens
                gate, norm = projected_states[:n, : self.tped_intermediate_size], self.norm
                output[:n] = rms_norm_gated(
                    output[:n], gate, norm.weight, eps=norm.variance_epsilon,
                    norm_before_gate=False, group_size=norm.group_size,
                )  # fmt: skip
            return result

    return MambaMixer2

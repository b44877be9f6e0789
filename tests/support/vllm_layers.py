"""Small layers of vLLM's classes, made without its configuration, and what a token of each comes to
in float64."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.vllm_steps import Pools, W

H, HV, K, V, G, D = 2, 4, 8, 16, 2, 12
Token = dict[str, Tensor]


class Kind:
    """A layer `of` vLLM, registered as ours, with its pools, in small. sizes: of a token's inputs.
    run(inputs, n): its output [n, ..]. oracle: as Scheduler.check wants it."""

    name: str
    metadata = "gdn_attn", "GDNAttentionMetadata"
    # that have the layer, and that take drafts in it
    releases: tuple[str, ...] = ("vllm-0.33.0", "vllm-0.26.0")
    drafts_of: tuple[str, ...] = releases
    sizes: Mapping[str, int]
    channels = 2 * H * K + HV * V
    shape: tuple[int, ...] = (HV, V, K)
    silu = True
    takes_short_prompts = False

    def __init__(self, engine: Any, drafts: int = 0, blocks: int = 60) -> None:
        self.engine, self.drafts = engine, drafts
        # a shorter piece of a prompt counts as drafts
        self.least = drafts + 2 if drafts and self.takes_short_prompts else 2
        generator = torch.Generator().manual_seed(0)
        self.normal: Callable[..., Tensor] = lambda *size: torch.randn(size, generator=generator)
        self.pools = Pools.make(blocks, self.channels, W - 1 + drafts, self.shape)
        registered = engine.custom.op_registry_oot[self.name]
        layer: Any = registered.__new__(registered)
        nn.Module.__init__(layer)
        layer.prefix, layer.tp_size, layer.tp_rank = "layer", 1, 0
        layer.kv_cache = self.pools.windows, self.pools.states
        layer.conv1d = self.convolution(self.channels)
        layer.activation = "silu" if self.silu else None
        layer.A_log, layer.dt_bias = self.normal(HV), self.normal(HV)
        self.layer = layer
        self.make(layer)

    def convolution(self, channels: int, bias: bool = False) -> Any:
        weight = self.normal(channels, 1, W)
        return SimpleNamespace(weight=weight, bias=self.normal(channels) if bias else None)

    def inputs(self, tokens: int) -> Token:
        return {n: self.normal(tokens, size) for n, size in self.sizes.items()}

    def make(self, layer: Any) -> None: ...

    def run(self, x: Token, n: int) -> Tensor:
        raise NotImplementedError

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def convolved(self, memory: Any, x: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Channels behind the convolution, its window, and the state or zeros."""
        window, state = memory or (
            torch.zeros(self.channels, W - 1, dtype=torch.float64),
            torch.zeros(self.shape, dtype=torch.float64),
        )
        window = torch.cat([window, x[:, None]], 1)
        weight, bias = self.layer.conv1d.weight[:, 0].double(), self.layer.conv1d.bias
        y = (window * weight).sum(1) + (0 if bias is None else bias.double())
        return F.silu(y) if self.silu else y, window[:, 1:], state


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """o and state [HV, V, K] after a token; q, k [H, K]; g [HV] or [HV, K]."""
    each = v.shape[0] // q.shape[0]
    q, k = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(each, 0) for x in (q, k))
    state = state * g.exp().view(v.shape[0], 1, -1)
    state = state + (beta[:, None] * (v - (state @ k[..., None])[..., 0]))[..., None] * k[:, None]
    return (state @ q[..., None])[..., 0] * q.shape[-1] ** -0.5, state


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


class DeltaNet(Kind):
    """Qwen's layer, by its operator with the norm."""

    name = "QwenGatedDeltaNetAttention"
    sizes = MappingProxyType({"qkvz": Kind.channels + HV * V, "b": HV, "a": HV})

    def make(self, layer: Any) -> None:
        layer.head_k_dim, layer.head_v_dim = K, V
        layer.num_k_heads, layer.num_v_heads, layer.key_dim, layer.value_dim = H, HV, H * K, HV * V
        layer.gdn_prefill_backend, layer._exports_checkpoints = "slipstream", False
        layer.enable_packed_recurrent_decode, layer.norms_in_core = True, True
        layer.gqa_interleaved_layout, layer.disable_tp_for_ba_proj = False, False
        layer.norm = SimpleNamespace(weight=self.normal(V), eps=1e-5, activation="silu")
        layer.chunk_gated_delta_rule = self.engine.gdn.ChunkGatedDeltaRule()

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, HV, V)
        ba = torch.cat([x["b"], x["a"]], -1)
        self.layer._forward_core_rocm(qkvz=x["qkvz"], ba=ba, z_out=ba, core_attn_out=out)
        return out

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        layer = self.layer
        qkv, z = x["qkvz"].split([self.channels, HV * V])
        y, window, state = self.convolved(memory, qkv)
        q, k, v = y.split([H * K, H * K, HV * V])
        g = -layer.A_log.double().exp() * F.softplus(x["a"] + layer.dt_bias.double())
        heads = q.view(H, K), k.view(H, K), v.view(HV, V)
        o, state = delta_rule(state, *heads, g, self.beta(x["b"]))
        return self.gated(o, z.view(HV, V)), (window, state)

    def beta(self, b: Tensor) -> Tensor:
        return b.sigmoid()

    def gated(self, o: Tensor, z: Tensor) -> Tensor:
        return rms_norm(o, self.layer.norm.weight, self.layer.norm.eps) * F.silu(z)


class OlmoDeltaNet(DeltaNet):
    """OLMo's, whose norm is outside; its beta goes to 2."""

    name = "OlmoHybridGatedDeltaNetAttention"

    def make(self, layer: Any) -> None:
        super().make(layer)
        layer.allow_neg_eigval = True

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, HV, V)
        qkv = x["qkvz"][:, : self.channels]
        self.layer._forward_core(mixed_qkv=qkv, b=x["b"], a=x["a"], core_attn_out=out)
        return out

    def beta(self, b: Tensor) -> Tensor:
        return 2 * b.sigmoid()

    def gated(self, o: Tensor, z: Tensor) -> Tensor:
        return o


class DeltaAttention(Kind):
    """Kimi's KDA."""

    name = "KimiGatedDeltaNetAttention"
    drafts_of = ("vllm-0.33.0",)
    channels, shape = 3 * HV * K, (HV, K, K)
    sizes = MappingProxyType({"qkv": channels, "g": HV * K, "beta": HV, "z": HV * K})
    bound: float | None = None

    def make(self, layer: Any) -> None:
        layer.head_dim, layer.local_num_heads, layer.local_projection_size = K, HV, HV * K
        layer.A_log, layer.dt_bias = self.normal(HV), self.normal(HV * K)
        layer.gate_lower_bound = self.bound
        layer.norms_in_core = self.is_apart and self.norms_in_core
        layer.o_norm = Norm(self.normal(K))
        weights = layer.conv1d.weight.split(HV * K)
        for name, weight in zip("qkv", weights, strict=True):
            setattr(layer, f"{name}_conv1d", SimpleNamespace(weight=weight, bias=None))

    norms_in_core = True

    @property
    def is_apart(self) -> bool:
        """In 0.26 q, k and v come apart, and the output has the norm's gates in it."""
        return self.engine.release == "vllm-0.26.0"

    def run(self, x: Token, n: int) -> Tensor:
        z = x["z"].view(1, -1, HV, K)
        out = z.clone() if self.is_apart and self.norms_in_core else torch.zeros_like(z)
        beta = x["beta"] if self.norms_in_core else x["beta"].sigmoid()
        given = {"g1": x["g"].view(1, -1, HV, K), "core_attn_out": out}
        if self.is_apart:
            parts = zip("qkv", x["qkv"].split(HV * K, -1), strict=True)
            given |= {f"{n}_proj_states": part.contiguous() for n, part in parts}
        else:
            given |= {"mixed_qkv": x["qkv"], "g2": z[0]}
        self.layer._forward(**given, beta=beta[None])
        return out[0]

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        y, window, state = self.convolved(memory, x["qkv"])
        q, k, v = y.view(3, HV, K)
        g = self.gate(x["g"])
        o, state = delta_rule(state, q, k, v, g, x["beta"].sigmoid())
        return self.gated(o, x["z"].view(HV, K)), (window, state)

    def gated(self, o: Tensor, z: Tensor) -> Tensor:
        norm = self.layer.o_norm
        return rms_norm(o, norm.weight, norm.eps) * z.sigmoid() if self.norms_in_core else o

    def gate(self, g: Tensor) -> Tensor:
        rate = self.layer.A_log.double().exp()[:, None]
        g = (g + self.layer.dt_bias.double()).view(HV, K)
        return -rate * F.softplus(g) if self.bound is None else self.bound * (rate * g).sigmoid()


class BoundedDeltaAttention(DeltaAttention):
    releases = ("vllm-0.33.0",)
    bound = -5.0


class BailingDeltaAttention(DeltaAttention):
    """Bailing's, which has beta and the gates made, and its norm outside."""

    name = "BailingMoeV3KimiDeltaAttention"
    releases = ("vllm-0.33.0",)
    is_apart = True  # type: ignore[assignment]
    norms_in_core = False

    def make(self, layer: Any) -> None:
        super().make(layer)
        layer.name = self.name
        layer.safe_gate, layer.lower_bound = True, -5.0

    def inputs(self, tokens: int) -> Token:
        x = super().inputs(tokens)
        return {**x, "g": -5 * x["g"].sigmoid()}

    def gate(self, g: Tensor) -> Tensor:
        return g.view(HV, K)


class Norm:
    """FusedRMSNormGated, as far as layers call it."""

    eps, activation = 1e-5, "sigmoid"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype) * z.sigmoid()


class Mamba2(Kind):
    name = "MambaMixer2"
    metadata = "mamba2_attn", "Mamba2AttentionMetadata"
    inner = HV * V
    channels = inner + 2 * G * K
    sizes = MappingProxyType({"projected": 2 * inner + 2 * G * K + HV})

    def make(self, layer: Any) -> None:
        layer.conv1d = self.convolution(self.channels, bias=True)
        layer.conv_weights = layer.conv1d.weight[:, 0]
        layer.tped_intermediate_size, layer.tped_conv_size = self.inner, self.channels
        layer.tped_dt_size = layer.num_heads = HV
        layer.head_dim, layer.ssm_state_size, layer.n_groups = V, K, G
        layer.A, layer.D, layer.dt_bias = -self.normal(HV).exp(), self.normal(HV), self.normal(HV)
        layer.num_spec, layer.is_blackwell, layer.use_replayssm = self.drafts, False, False
        layer.cache_config = SimpleNamespace(mamba_block_size=None, mamba_cache_mode="none")
        layer.conv_kernel_size, layer.norms_in_core = W, True
        layer.norm = SimpleNamespace(
            weight=self.normal(self.inner), variance_epsilon=1e-5, group_size=self.inner // G
        )
        sizes = [self.inner, G * K, G * K]
        layer.split_hidden_states_B_C_fn = lambda x: torch.split(x, sizes, dim=-1)

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, self.inner)
        self.layer.conv_ssm_forward(projected_states=x["projected"], output=out)
        return out

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        layer = self.layer
        gate, channels, dt = x["projected"].split([self.inner, self.channels, HV])
        y, window, state = self.convolved(memory, channels)
        v, B, C = y.split([self.inner, G * K, G * K])
        v, (B, C) = v.view(HV, V), (t.view(G, K).repeat_interleave(HV // G, 0) for t in (B, C))
        dt = F.softplus(dt + layer.dt_bias.double())
        state = state * (dt * layer.A.double()).exp()[:, None, None]
        state = state + (dt[:, None] * v)[..., None] * B[:, None]
        o = (state @ C[..., None])[..., 0] + layer.D.double()[:, None] * v
        o = (o.flatten() * F.silu(gate)).view(G, -1)
        y = rms_norm(o, torch.ones(1), 1e-5).flatten() * layer.norm.weight.double()
        return y, (window, state)


class Mamba1(Kind):
    name = "MambaMixer"
    drafts_of = ()
    metadata = "mamba1_attn", "Mamba1AttentionMetadata"
    channels, shape = D, (D, K)
    sizes = MappingProxyType({"x": 2 * D})

    def make(self, layer: Any) -> None:
        layer.conv1d = self.convolution(D, bias=True)
        layer.cache_config = SimpleNamespace(mamba_block_size=None, mamba_cache_mode="none")
        layer.is_lora_enabled = False
        layer.A, layer.D = -self.normal(D, K).exp(), self.normal(D)
        weight, layer.bias = self.normal(D, D + 2 * K), self.normal(D)
        layer.in_proj = layer.out_proj = lambda x: (x, None)
        layer._time_proj_bias = lambda: layer.bias
        layer._ssm_transform = lambda x: tuple(
            t.mT if n == 0 else t for n, t in enumerate((x @ weight).split([D, K, K], -1))
        )
        self.weight = weight

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, D)
        self.layer.forward_impl(x["x"], out)
        return out

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        layer, (channels, gate) = self.layer, x["x"].chunk(2)
        u, window, state = self.convolved(memory, channels)
        dt, B, C = (u @ self.weight.double()).split([D, K, K])
        dt = F.softplus(dt + layer.bias.double())[:, None]
        state = state * (dt * layer.A.double()).exp() + dt * B * u[:, None]
        y = (state * C).sum(1) + layer.D.double() * u
        return y * F.silu(gate), (window, state)


class ShortConvolution(Kind):
    name = "ShortConv"
    drafts_of = ("vllm-0.33.0",)
    metadata = "short_conv_attn", "ShortConvAttentionMetadata"
    channels, shape, silu = D, (1,), False
    sizes = MappingProxyType({"BCx": 3 * D})

    def make(self, layer: Any) -> None:
        layer.conv = layer.conv1d
        layer.in_proj = layer.out_proj = lambda x: (x, None)

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, D)
        self.layer.forward_cuda(x["BCx"], out)
        return out

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        B, C, u = x["BCx"].chunk(3)
        y, window, state = self.convolved(memory, B * u)
        return C * y, (window, state)


class Lightning(Kind):
    """MiniMax's."""

    name = "MiniMaxText01LinearAttention"
    drafts_of = ()
    metadata = "linear_attn", "LinearAttentionMetadata"
    channels, shape = 1, (HV, K, K)
    sizes = MappingProxyType({"qkv": 3 * HV * K})

    def make(self, layer: Any) -> None:
        layer.kv_cache = (self.pools.states,)
        layer.tp_heads, layer.head_dim, layer.BLOCK, layer.layer_idx = HV, K, 256, 0
        layer.tp_slope = self.normal(HV, 1, 1).abs()
        layer.qkv_proj = layer.out_proj = lambda x: (x, None)
        layer.output_gate = lambda x: (torch.zeros(()), None)
        layer.norm = SimpleNamespace(_forward=lambda x: 2 * x)

    def run(self, x: Token, n: int) -> Tensor:
        out = torch.zeros(n, HV * K)
        self.layer._forward(x["qkv"], out, torch.arange(n))
        return out

    def oracle(self, memory: Any, x: Token) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x["qkv"])
        state = torch.zeros(self.shape, dtype=torch.float64) if memory is None else memory
        state = state * (-self.layer.tp_slope.double()).exp() + k[..., None] * v[:, None]
        return (state * q[..., None]).sum(1).flatten(), state

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return F.silu(qkv).view(HV, 3, K).unbind(1)


class BailingLightning(Lightning):
    name = "BailingMoELinearAttention"
    takes_short_prompts = True
    drafts_of = ("vllm-0.33.0", "vllm-0.26.0")
    metadata = "linear_attn", "BailingLinearAttentionMetadata"

    def make(self, layer: Any) -> None:
        super().make(layer)
        layer.query_key_value, layer.dense = layer.qkv_proj, layer.out_proj
        layer.q_size_per_rank = layer.kv_size_per_rank = HV * K
        layer.tp_kv_heads, layer.scaling, layer.group_norm_size = HV, K**-0.5, 1
        layer.linear_silu, layer.use_qk_norm = True, False
        layer.linear_rope, layer.linear_scale = False, True
        layer.g_proj, layer.g_norm = layer.output_gate, lambda x: 2 * x

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = F.silu(qkv).view(3, HV, K)
        return q * K**-0.5, k, v


KINDS = (
    DeltaNet, OlmoDeltaNet, DeltaAttention, BoundedDeltaAttention, BailingDeltaAttention, Mamba2,
    Mamba1, ShortConvolution, Lightning, BailingLightning,
)  # fmt: skip

"""Causal softmax attention: with rotary positions and grouped heads, or with a forgetting gate (the
Forgetting Transformer's).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.common.varlen import bounded_offsets
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.layers.base import Mixer, NormalLinear, expect_divisor
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import linear, projections, rounded
from slipstream.nn.norm import RMS_NORMS
from slipstream.ops import _fp32, flash_attn, norm, rotary
from slipstream.ops.attention import attention, rotary_attention
from slipstream.runtime import token_ids

# cos and sin of tokens' places, None where nothing is rotated
_Tables = tuple[Tensor, Tensor] | None


class Attention(Mixer):
    """Softmax attention, the layer of a transformer.

        q, k = rotary(x W_q), rotary(x W_k);  y = softmax(q k^T / sqrt(K), causal) (x W_v) W_o

    Args:
        hidden_size: D.
        num_heads: H, of queries.
        num_kv_heads: HKV, of keys and values, a divisor of H; None is H.
        head_dim: K; None is D / H.
        rotary_dim: how many features of a head are rotated; None is all, 0 none.
        rotary_base: of the angles.
        qk_norm: an rms norm with a weight [K] on each head's query and key, before the rotation:
            a name of nn.norm.RMS_NORMS; True is "rms".
        window_size: each token sees this many last tokens, itself included; None is all.
        norm_eps: of qk_norm.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        output_gate: y = (softmax(...) * sigmoid(x W_g)) W_o, as Qwen3-Next's.
        mode: None; this layer has no recurrent form. layer_idx: as Mixer.

    State: k and v [N, S, HKV, K], each sequence from index 0, and length [N] <= S.
    Source: Vaswani et al., Attention Is All You Need, 2017; Su et al., RoFormer, 2021;
        Ainslie et al., GQA, 2023.
    """

    token_states = ("k", "v")
    leaves_states = True
    verifies_drafts = True
    rounded_keys = ("k", "v")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        rotary_base: float = 10000.0,
        qk_norm: bool | str = False,
        window_size: int | None = None,
        norm_eps: float = 1e-6,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        qkv_bias: bool = False,
        output_gate: bool = False,
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        expect_divisor("num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        self.head_dim = head_dim
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size: want at least 1 token or None, got {window_size}")
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.rotary_base, self.window_size, self.norm_eps = rotary_base, window_size, norm_eps
        name = qk_norm if isinstance(qk_norm, str) else "rms"
        if name not in RMS_NORMS:
            raise ValueError(f"qk_norm: want a bool or one of {', '.join(RMS_NORMS)}, got {name!r}")
        self.qk_options = RMS_NORMS[name]
        heads = num_heads + 2 * self.num_kv_heads
        self.qkv_proj = NormalLinear(hidden_size, heads * head_dim, bias=qkv_bias)
        self.o_proj = NormalLinear(num_heads * head_dim, hidden_size)
        width = num_heads * head_dim
        self.g_proj = NormalLinear(hidden_size, width) if output_gate else None
        self.q_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.q_norm, self.k_norm):
            if weight is not None:
                nn.init.constant_(weight, NormOptions(0.0, **self.qk_options).neutral_weight)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        tables = self._tables(x, call)
        qkv, gate = linear.linears(x, (self.qkv_proj, self.g_proj))
        alone = call.state is None and call.context is None and not call.use_cache
        if alone and tables is not None and self._only_rotates(qkv):
            heads = qkv.unflatten(-1, (-1, self.head_dim))
            # an adapter, or another module in its place, may read what it has returned
            fresh = linear.plain_linear(self.qkv_proj)
            more = self.sizes, self.window_size, call.cu_seqlens, fresh
            o = rotary_attention(heads, tables, *more)
            return self.o_proj(self._gated(o, gate)), None
        q, k, v = self._heads(qkv, tables)
        (k, v), masks, cache = keys_to_attend(call, k=k, v=v)
        if call.context is not None and self._only_rotates(qkv):
            v = v.contiguous()  # a view of qkv would have all of it stay for the backward
        o = attention(q, k, v, window_size=self.window_size, **masks)
        return self.o_proj(self._gated(o, gate)), cache

    def has_fused_step(self) -> bool:
        return True

    def _advance(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        norm: nn.Module | None = None,
        residual: projections.Residual = None,
        **options: Any,
    ) -> Any:
        lengths = state["length"]
        tables = self._tables(x, MixerCall(positions=positions, state=state))
        qkv, gate = projections.linears(x, (self.qkv_proj, self.g_proj), norm)
        q, k, v = self._heads(qkv, tables)
        if rounded.has_rounded(state):
            o = self._on_rounded(q, k, v, state)
            return projections.projected(self._gated(o, gate), self.o_proj, residual)
        if x.shape[1] == 1 and self._writes_in_kernel(k, state):
            o = self._with_cache(q, state, k, v)
            lengths.add_(1)
            return projections.projected(self._gated(o, gate), self.o_proj, residual)
        append({"k": k, "v": v}, state)
        keys, values = state["k"], state["v"]
        o = attention(q, keys, values, window_size=self.window_size, key_lengths=lengths)
        return projections.projected(self._gated(o, gate), self.o_proj, residual)

    def _on_rounded(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> Tensor:
        """o of a cache in 8 bits, with the new keys behind it."""
        given = rounded.rounded({"k": k, "v": v}, rounded.key_dtype_of(state), self.rounded_keys)
        append(given, state)
        scales = {"k_scale": state["k_scale"], "v_scale": state["v_scale"]}
        return self._with_cache(q, state, **scales)

    def _writes_in_kernel(self, k: Tensor, state: State) -> bool:
        """Whether one launch writes a token's key and value behind the others."""
        plain = k.is_cuda and not torch.compiler.is_compiling() and self.head_dim <= 128
        return plain and state["k"].dtype == k.dtype and not torch.is_autocast_enabled("cuda")

    def _with_cache(self, q: Tensor, state: State, *new: Tensor, **scales: Tensor) -> Tensor:
        """o of q on the keys of a state, behind which new ones may be written."""
        o = flash_attn.flash_attn_with_kvcache(
            q,
            state["k"],
            state["v"],
            *new,
            cache_seqlens=state["length"],
            causal=True,
            window_size=(-1 if self.window_size is None else self.window_size - 1, 0),
            **scales,
        )
        assert isinstance(o, Tensor)
        return o

    def _gated(self, o: Tensor, gate: Tensor | None) -> Tensor:
        o = o.flatten(-2)
        return o if gate is None else o * gate.sigmoid()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def _only_rotates(self, qkv: Tensor) -> bool:
        """Whether nothing but a rotation by tables is between the projection and attention."""
        return self.rotary_dim > 0 and self.q_norm is None

    def _tables(self, x: Tensor, call: MixerCall) -> _Tables:
        return call.tables(x, self.rotary_dim, self.rotary_base) if self.rotary_dim else None

    def _heads(self, qkv: Tensor, tables: _Tables) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of what qkv_proj returns, normalised and rotated."""
        heads = self.sizes
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        if self.q_norm is None and tables is not None:
            return rotary.rotary_heads(qkv, tables, heads)
        if self.q_norm is None:
            qk, v = qkv.split([heads[0] + heads[1], heads[2]], dim=2)
        else:
            q, k, v = qkv.split(heads, dim=2)
            q = norm.rms_norm(q, self.q_norm, eps=self.norm_eps, **self.qk_options)
            k = norm.rms_norm(k, self.k_norm, eps=self.norm_eps, **self.qk_options)
            qk = torch.cat([q, k], dim=2)
        if tables is not None:
            qk = rotary.rotary_embedding(qk, *tables)
        q, k = qk.split(heads[:2], dim=2)
        return q, k, v


def append(new: State, state: State) -> None:
    """Writes tokens [N, T, ...] behind each sequence's in the cache [N, S, ...], in place.

    Raises:
        IndexError: there is no room, on a CPU. ValueError: as expect_room, on CUDA.
    """
    first, lengths = next(iter(new.values())), state["length"]
    sequences, tokens = first.shape[:2]
    if first.is_cuda:
        expect_room(next(iter(new)), state, tokens)
    row = torch.arange(sequences, device=first.device)[:, None]
    index = lengths[:, None]
    if tokens != 1:
        index = index + torch.arange(tokens, device=first.device)
    for name, x in new.items():
        state[name].index_put_((row, index), x.to(state[name].dtype))
    lengths.add_(tokens)


def expect_room(name: str, state: State, tokens: int) -> None:
    """Checks that each sequence has places for more tokens, where torch's own check of an index
    would end the process. On CUDA the next call raises; the lengths are cut, so that no index
    leaves the cache.

    Raises:
        ValueError: there are fewer places, or an earlier call went past the last.
    """
    room, lengths = state[name].shape[1], state["length"]
    if tokens > room:
        text = f"state[{name!r}]: want room for {tokens} more tokens, got {room} places"
        raise ValueError(text)
    of = f"lengths that leave {tokens} places"
    token_ids.expect_below("state['length']", lengths, room - tokens + 1, of)
    lengths.clamp_(max=room - tokens)


class InPlace(dict[str, Tensor]):
    """A state whose tensors of tokens have room for those of a call, which writes them there."""


def keys_to_attend(
    call: MixerCall, **new: Tensor
) -> tuple[list[Tensor], dict[str, Any], State | None]:
    """Keys, values and others for all that the tokens of a call see, each in the place of `new`;
    arguments of `attention` that say which of them; the next state."""
    masks: dict[str, Any] = {"cu_seqlens": call.cu_seqlens, "context": call.context}
    if call.state is None and not call.use_cache:
        return [*new.values()], masks, None
    if call.context is not None:
        raise NotImplementedError("use_cache, state: want neither with a context")
    cache = extended(new, call)
    after = cache if call.use_cache else None
    if call.state is None:  # the new keys are all there are
        return [*new.values()], masks, after
    return [cache[name] for name in new], masks | {"key_lengths": cache["length"]}, after


def extended(new: State, call: MixerCall) -> State:
    """The cache [N, S, ...] with the tokens of [B, T, ...], each sequence's behind its old ones."""
    cu_seqlens, state = call.cu_seqlens, call.state
    first = next(iter(new.values()))
    lengths = call.next_lengths(first)
    if state is None and cu_seqlens is None:
        # as copies, for these are views of much more
        return {**{name: x.contiguous() for name, x in new.items()}, "length": lengths}
    if cu_seqlens is None:
        sequences, room = first.shape[:2]
        sequence = torch.arange(sequences, device=first.device)[:, None]
        index = torch.arange(room, device=first.device)
    else:
        begin = bounded_offsets(cu_seqlens, first.shape[1])
        counts = begin.diff()
        sequences = counts.shape[0]
        # the one host sync: a prefill has to know how long its longest sequence is
        room = int(counts.max()) if sequences else 0
        token = torch.arange(first.shape[1], device=first.device)
        sequence = torch.searchsorted(begin[1:], token, right=True)
        index = token - begin[sequence]
        new = {name: x[0] for name, x in new.items()}
    if state is not None:
        index = index + state["length"][sequence]
    grown = {"length": lengths}
    for name, x in new.items():
        inner = x.shape[(2 if cu_seqlens is None else 1) :]
        if state is None:
            old = x.new_zeros(sequences, room, *inner)
        elif isinstance(state, InPlace):
            grown[name] = state[name].index_put_((sequence, index), x)
            continue
        else:
            old = F.pad(state[name], (0, 0) * len(inner) + (0, room))
        grown[name] = old.index_put((sequence, index), x)
    return grown


class ForgettingAttention(Attention):
    """Attention whose scores fall by how much the tokens between have forgotten.

        f = logsigmoid(x W_f + b_f);  scores q_t . k_s / sqrt(K) + f_{s+1} + ... + f_t

    Args:
        rotary_dim: features of a head that are rotated: none, as the paper has it.
        the others: as Attention.

    State: that of Attention and f [N, S, H], float32.
    Source: Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, 2025.
    """

    token_states = ("k", "v", "f")
    rounded_keys = ()

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = 0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim, **options)
        self.f_proj = NormalLinear(hidden_size, num_heads, bias=True)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        q, k, v = self._heads(self.qkv_proj(x), self._tables(x, call))
        f = F.logsigmoid(_fp32.widen(self.f_proj(x)))
        (k, v, f), masks, cache = keys_to_attend(call, k=k, v=v, f=f)
        o = attention(q, k, v, g=f, window_size=self.window_size, **masks)
        return self._joined(x, o), cache

    def has_fused_step(self) -> bool:
        return False

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        tables = self._tables(x, MixerCall(positions=positions, state=state))
        q, k, v = self._heads(self.qkv_proj(x), tables)
        append({"k": k, "v": v, "f": F.logsigmoid(_fp32.widen(self.f_proj(x)))}, state)
        o = attention(
            q,
            state["k"],
            state["v"],
            g=state["f"],
            window_size=self.window_size,
            key_lengths=state["length"],
        )
        return self._joined(x, o)

    def _joined(self, x: Tensor, o: Tensor) -> Tensor:
        return self.o_proj(self._gated(o, None if self.g_proj is None else self.g_proj(x)))

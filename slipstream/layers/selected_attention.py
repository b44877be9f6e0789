"""Softmax attention to the blocks of keys that an indexer selects (QSA and MSA), or to single ones
(DSA).

The indexer has heads and one key of its own, reads x without gradient, and learns from
ops.index_loss alone, whose gradient goes along with that of the queries.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.common import checks, key_blocks
from slipstream.layers.attention import Attention, append, attention, keys_to_attend
from slipstream.layers.base import Mixed, Mixer, MixerCall, NormalLinear, State
from slipstream.layers.mla import MLA, absorbed
from slipstream.nn import decoding, linear
from slipstream.nn.norm import LayerNorm
from slipstream.ops import indexer, norm, rotary
from slipstream.runtime.autograd import with_loss


class _Indexed(Mixer):
    """A layer with an indexer."""

    def _set_indexer(
        self, heads: int, dim: int, turned: int, block: int, topk: int, weight: float
    ) -> None:
        """turned: features of the indexer that are rotated."""
        if block not in key_blocks.SIZES or not isinstance(block, int):
            raise ValueError(f"block: want one of {key_blocks.SIZES}, got {block}")
        for name, count in {"topk": topk, "index_heads": heads, "index_dim": dim}.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: want an integer, 1 or more, got {count!r}")
        if not isinstance(weight, int | float):
            raise TypeError(f"index_loss: want a number, got {type(weight).__name__}")
        checks.expect_not_negative("index_loss", weight)
        if dim < turned:
            raise ValueError(f"index_dim: want the {turned} that are rotated or more, got {dim}")
        self.index_heads, self.index_dim = heads, dim
        self.block, self.topk, self.index_loss = block, topk, float(weight)

    def has_fused_step(self) -> bool:
        return False

    def _loss_weight(self, call: MixerCall) -> float:
        """What the indexer's loss counts in this call, which has neither context nor parents."""
        if call.context is not None:
            raise NotImplementedError(f"context, parents: {type(self).__name__} has neither")
        trains = self.training and torch.is_grad_enabled() and call.state is None
        return self.index_loss if trains else 0.0


class _Selected(_Indexed, Attention):
    """What QSA and MSA share. index_proj makes the indexer's queries, and last its key."""

    token_states = ("k", "v", "index_k")
    rounded_keys = ()
    tail: bool
    groups: int

    def _add_indexer(
        self, hidden_size: int, heads: int, dim: int, block: int, topk: int, weight: float
    ) -> None:
        self._set_indexer(heads, dim, self.rotary_dim, block, topk, weight)
        self.index_proj = NormalLinear(hidden_size, (heads + 1) * dim)
        self.index_q_norm = nn.Parameter(torch.empty(dim))
        self.index_k_norm = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in ("index_q_norm", "index_k_norm") if hasattr(self, "index_k_norm") else ():
            like = norm.NormOptions(0.0, **self.qk_options)
            nn.init.constant_(getattr(self, name), like.neutral_weight)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        weight = self._loss_weight(call)
        q, k, v, gate = self._main(x, call)
        with torch.set_grad_enabled(weight > 0):  # lists have no gradient
            asked, key = self._index_heads(x, call)
        keys, masks, cache = keys_to_attend(call, k=k, v=v, index_k=key)
        with torch.set_grad_enabled(weight > 0):
            entries = self._index_keys(keys[2], call.cu_seqlens if call.state is None else None)
            of: dict[str, Any] = self._index_options | {"cu_seqlens": call.cu_seqlens}
            lengths = masks.get("key_lengths")
            selected = indexer.index(asked, entries, key_lengths=lengths, **self._lists, **of)
        if weight > 0:
            own = asked, entries, q.detach(), k.detach()
            q = with_loss(q, indexer.index_loss(*own, selected=selected, **of), weight)
        o = self._attend(q, keys[0], keys[1], selected, masks)
        return self.o_proj(self._gated(o, gate)), cache

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        call = MixerCall(positions=positions, state=state)
        q, k, v, gate = self._main(x, call)
        asked, key = self._index_heads(x, call)
        append({"k": k, "v": v, "index_k": key}, state)
        lengths = state["length"]
        entries = self._index_keys(state["index_k"], None)
        of = self._index_options | self._lists
        selected = indexer.index(asked, entries, key_lengths=lengths, **of)
        o = self._attend(q, state["k"], state["v"], selected, {"key_lengths": lengths})
        return self.o_proj(self._gated(o, gate))

    def _main(self, x: Tensor, call: MixerCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Heads of the attention, and the gate of its output."""
        gate = None if self.g_proj is None else self.g_proj(x)
        return *self._heads(self.qkv_proj(x), self._tables(x, call)), gate

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, masks: dict[str, Any]
    ) -> Tensor:
        options: dict[str, Any] = {"selected": selected, "block": self.block, "tail": self.tail}
        return attention(q, k, v, window_size=self.window_size, **options, **masks)

    def _index_normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, eps=self.norm_eps, **self.qk_options)

    def _raw_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's queries [B, T, HI, D], normalised, and key [B, T, 1, D]."""
        heads = self.index_proj(x.detach()).unflatten(-1, (-1, self.index_dim))
        q, k = heads.split([self.index_heads, 1], 2)
        return self._index_normed(q, self.index_q_norm), k

    def _index_heads(self, x: Tensor, call: MixerCall) -> tuple[Tensor, Tensor]:
        """The indexer's queries [B, T, HI, D], and what the cache has of its key [B, T, D]."""
        raise NotImplementedError

    def _index_keys(self, key: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """What ops.index has as k, of that [B or N, S, D]."""
        raise NotImplementedError

    @property
    def _index_options(self) -> dict[str, Any]:
        return {"block": self.block, "groups": self.groups}

    @property
    def _lists(self) -> dict[str, Any]:
        return {"topk": self.topk}


class QSA(_Selected):
    """Attention to blocks of keys selected by the mean of the indexer's keys, one list for all
    heads; a query also sees its own block until that is complete.

        I_tj = sum_h relu(q'_th . m_j)      m_j = rotary(norm(mean of k'_s over block j))
        y = attention(q, k, v to the topk blocks and the open one) W_o

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim: as Attention.
        block: 1, 4, 16, 64 or 128 keys.
        topk: blocks a list.
        index_heads: HI, of the indexer's queries.
        index_dim: D of the indexer, at least rotary_dim.
        index_loss: in training, weight of ops.index_loss, which trains the indexer alone; 0 does
            not train it. Each backward adds its gradient, a mean over that call's tokens, beside
            what a model returns as its loss, which does not contain it.
        the others: as Attention. The indexer's norms are of qk_norm's kind, "rms" without it.

    Its indexer rotates by places in the sequence whatever `positions` are. State: that of
    Attention and index_k [N, S, D], k' as projected. Refuses context, parents and shard_heads.
    Source: Qwen Team, Qwen3.8-Flash-Next, 2026 (qwen4_exp of transformers).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        block: int = 4,
        topk: int = 512,
        index_heads: int = 4,
        index_dim: int = 128,
        index_loss: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim, **options)
        self.tail, self.groups = True, 1
        self._add_indexer(hidden_size, index_heads, index_dim, block, topk, index_loss)

    def _index_heads(self, x: Tensor, call: MixerCall) -> tuple[Tensor, Tensor]:
        q, k = self._raw_heads(x)
        if self.rotary_dim:
            places = call._replace(positions=None)
            q = rotary.rotary_embedding(q, *places.tables(x, self.rotary_dim, self.rotary_base))
        return q, k[:, :, 0]

    def _index_keys(self, key: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        _, places = key_blocks.blocks_of(key.shape[1], self.block, cu_seqlens, key.device)
        means = self._index_normed(
            key_blocks.pooled_keys(key, self.block, cu_seqlens), self.index_k_norm
        )
        if not self.rotary_dim:
            return means
        tables = decoding.tables(places[None], self.rotary_dim, self.rotary_base, key.dtype)
        return rotary.rotary_embedding(means[:, :, None], *tables)[:, :, 0]

    @property
    def _index_options(self) -> dict[str, Any]:
        return super()._index_options | {"pool": "none"}


class MSA(_Selected):
    """Attention to blocks of keys selected by the best of the indexer's keys, a list for each head
    of keys; the last blocks are always seen.

        I_tgj = max over s in j, s <= t, of q'_tg . k'_s        one indexer head g a head of keys
        y = attention(q, k, v to the topk blocks) W_o

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim: as Attention.
        block: 1, 4, 16, 64 or 128 keys.
        topk: blocks a list.
        local: how many of them are the last ones, at least 1.
        index_dim: D of the indexer, at least rotary_dim.
        index_loss: as QSA.
        the others: as Attention. The indexer's norms are of qk_norm's kind, "rms" without it.

    State: that of Attention and index_k [N, S, D], k' rotated. Refuses context, parents and
    shard_heads.
    Source: MiniMax, MiniMax Sparse Attention, 2026 (minimax_m3_vl of transformers).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        block: int = 128,
        topk: int = 16,
        local: int = 1,
        index_dim: int = 128,
        index_loss: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim, **options)
        if not 1 <= local <= topk:
            raise ValueError(f"local: want 1 to the {topk} blocks of topk, got {local}")
        self.local, self.tail, self.groups = local, False, self.num_kv_heads
        self._add_indexer(hidden_size, self.groups, index_dim, block, topk, index_loss)

    def _index_heads(self, x: Tensor, call: MixerCall) -> tuple[Tensor, Tensor]:
        q, k = self._raw_heads(x)
        k = self._index_normed(k, self.index_k_norm)
        tables = self._tables(x, call)
        if tables is not None:
            both = rotary.rotary_embedding(torch.cat([q, k], 2), *tables)
            q, k = both.split([self.index_heads, 1], 2)
        return q, k[:, :, 0]

    def _index_keys(self, key: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return key

    @property
    def _index_options(self) -> dict[str, Any]:
        return super()._index_options | {"activation": "identity"}

    @property
    def _lists(self) -> dict[str, Any]:
        return super()._lists | {"local": self.local}


class DSA(_Indexed, MLA):
    """Multi-head latent attention to the single keys that a lightning indexer selects.

        I_ts = sum_h w_th relu(q'_th . k'_s)      q' of the queries' latent, w of x
        y = attention(q, k, v of the topk latents) W_o

    Args:
        hidden_size, num_heads, q_lora_rank: as MLA; without a rank q' is made of x.
        topk: keys a query.
        index_heads: HI, of the indexer's queries.
        index_dim: D of the indexer, at least rope_head_dim; the first of its features are rotated.
        index_interleaved: as MLA's interleaved, of the indexer's: DeepSeek's are not, GLM's are.
        index_loss: as QSA.
        the others: as MLA.

    State: that of MLA and index_k [N, S, D], k' rotated. Refuses context, parents and shard_heads.
    Cost: keys and values are written out for prompts and training, where selected attention takes
        heads of nope + rope features and v_head_dim; a few tokens read the latents of their lists.
    Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (deepseek_v32, glm_moe_dsa of transformers).
    """

    token_states = ("latent", "index_k")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        q_lora_rank: int | None = None,
        topk: int = 2048,
        index_heads: int = 64,
        index_dim: int = 128,
        index_interleaved: bool = False,
        index_loss: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, q_lora_rank, **options)
        turned = 0 if self.rotary_base is None else self.rope
        self._set_indexer(index_heads, index_dim, turned, 1, topk, index_loss)
        self.index_interleaved = index_interleaved
        width = q_lora_rank or hidden_size
        self.index_q_proj = NormalLinear(width, index_heads * index_dim)
        # the key, and what each head counts
        self.index_proj = NormalLinear(hidden_size, index_dim + index_heads)
        self.index_k_norm = LayerNorm(index_dim, eps=1e-6)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        weight = self._loss_weight(call)
        narrow = self._narrow(x)
        q, latent = self._project(x, narrow, call)
        with torch.set_grad_enabled(weight > 0):  # lists have no gradient
            own = self._index_heads(x, narrow, call)
        (latents, keys), masks, cache = keys_to_attend(call, latent=latent, index_k=own[1])
        selected = self._index(own, keys, masks)
        if weight > 0:
            q = with_loss(q, self._loss(own, q, latent, selected, call), weight)
        absorbs = call.state is not None and call.cu_seqlens is None and self._absorbs(x)
        return self._attend(q, latents, selected, masks, absorbs), cache

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        call = MixerCall(positions=positions, state=state)
        narrow = self._narrow(x)
        q, latent = self._project(x, narrow, call)
        own = self._index_heads(x, narrow, call)
        append({"latent": latent, "index_k": own[1]}, state)
        masks = {"key_lengths": state["length"]}
        selected = self._index(own, state["index_k"], masks)
        return self._attend(q, state["latent"], selected, masks, self._absorbs(x))

    def _index_heads(
        self, x: Tensor, narrow: Tensor, call: MixerCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q' [B, T, HI, D], k' [B, T, D] and w [B, T, HI]."""
        q = self.index_q_proj(narrow.detach()).unflatten(-1, (-1, self.index_dim))
        k, w = self.index_proj(x.detach()).split([self.index_dim, self.index_heads], -1)
        both = torch.cat([q, self.index_k_norm(k)[:, :, None]], 2)
        if self.rotary_base is not None:
            tables = call.tables(x, self.rope, self.rotary_base)
            both = rotary.rotary_embedding(both, *tables, interleaved=self.index_interleaved)
        q, k = both.split([self.index_heads, 1], 2)
        return q, k[:, :, 0], w * self.index_heads**-0.5

    def _index(
        self, own: tuple[Tensor, Tensor, Tensor], keys: Tensor, masks: dict[str, Any]
    ) -> Tensor:
        """int32 [B, T, 1, topk]"""
        packed: Any = {x: masks.get(x) for x in ("cu_seqlens", "key_lengths")}
        return indexer.index(own[0], keys, own[2], topk=self.topk, **packed)

    def _loss(
        self,
        own: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        latent: Tensor,
        selected: Tensor,
        call: MixerCall,
    ) -> Tensor:
        """Of queries with keys' projection absorbed, for one key of all heads is less to gather."""
        q, latent = q.detach(), latent.detach()
        if linear.plain_linear(self.kv_b_proj):
            q, _ = absorbed(q, self.kv_b_proj.weight.detach(), self.nope, self.v_head_dim)
            keys = latent[:, :, None]
        else:
            with torch.no_grad():
                keys, _ = self._written_out(latent)
        options: dict[str, Any] = {"selected": selected, "attention_scale": self.scale}
        options["cu_seqlens"] = call.cu_seqlens
        return indexer.index_loss(*own[:2], q, keys, own[2], **options)

    def _attend(
        self, q: Tensor, latent: Tensor, selected: Tensor, masks: dict[str, Any], absorbs: bool
    ) -> Tensor:
        if absorbs:
            o = self._absorbed(q, latent, masks["key_lengths"], selected[:, :, 0])
        else:
            k, v = self._written_out(latent)
            o = attention(q, k, v, scale=self.scale, selected=selected, **masks)
        return self.o_proj(o.flatten(-2))

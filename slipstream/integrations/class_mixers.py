"""Mixers that are classes of transformers' models with loops of their own, on our operators.

patch() puts the functions of FORWARDS in the place of forward of the classes of these names, and
METHODS into classes that lack them. A function has the arguments of the forward, by its names.

rows_of() says what is packed and what is padding; a mixer packs what it reads by it and unpacks
what it returns, so that sequences stay apart and states pass padding by, on either side.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import linear_mixers
from slipstream.integrations.linear_mixers import running
from slipstream.ops import conv, hgrn, rwkv4
from slipstream.ops._fp32 import widen
from slipstream.ops.recurrent_step import recurrent_step
from slipstream.ops.simple_gla import chunk_simple_gla
from slipstream.ops.token_shift import token_shift


class Rows(NamedTuple):
    """Rows [B, T] as one of several sequences, the tokens of padding behind all others.

    size: B, T. cuts: offsets [N+1] of the sequences; None if the rows stay as they are. first, last
    [B]: the sequence that a row begins with, and ends with. order: [B T], the token at each place;
    None without padding.
    """

    size: tuple[int, int]
    cuts: Any = None
    first: Any = None
    last: Any = None
    order: Any = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, B T, ...], or x."""
        if self.cuts is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.order is None else x[self.order])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """The reverse of pack."""
        if self.cuts is None:
            return x
        rows = (
            x[0] if self.order is None else torch.empty_like(x[0]).index_copy(0, self.order, x[0])
        )
        return rows.unflatten(0, self.size)

    def enter(self, state: Tensor | None, new: float = 0.0) -> Any:
        """The state before each sequence, of rows [B, ...]; `new` before those within a row."""
        if state is None or self.cuts is None:
            return state
        before = state.new_full((len(self.cuts) - 1, *state.shape[1:]), new)
        return before.index_copy(0, self.first, state)

    def leave(self, state: Tensor | None) -> Any:
        """The state after each row, of sequences [N, ...]."""
        return state if state is None or self.cuts is None else state[self.last]


def rows_of(kwargs: dict[str, Any], x: Tensor, mask: Any = None) -> Rows:
    """What is packed in x [B, T, ...], and what is padding. mask: [B, T], 0 at padding, for a layer
    whose model did not say.

    Raises:
        ValueError: another number of tokens is packed.
    """
    B, T = x.shape[:2]
    seq_idx, real = linear_mixers.sequences_of(kwargs, B, T), running.real_of_layer
    if real is None and isinstance(mask, Tensor) and mask.shape == (B, T):
        real = mask.bool()
    for name, given in (("seq_idx", seq_idx), ("attention_mask", real)):
        if given is not None and given.shape != (B, T):
            raise ValueError(f"{name}: want shape {(B, T)}, got {tuple(given.shape)}")
    if seq_idx is None and real is None:
        return Rows((B, T))
    key: Any = seq_idx if real is None else real
    if linear_mixers.is_unreadable(key):
        return _find_rows(seq_idx, real, B, T)
    found = getattr(key, "slipstream_rows", None)
    if found is None or found[0] is not seq_idx:
        found = seq_idx, _find_rows(seq_idx, real, B, T)
        key.slipstream_rows = found  # every layer asks
    return found[1]


def _find_rows(seq_idx: Tensor | None, real: Tensor | None, B: int, T: int) -> Rows:
    device = (seq_idx if real is None else real).device  # pyright: ignore[reportOptionalMemberAccess]
    number, order, row = B * T, None, torch.arange(B * T, device=device) // T
    bounds = torch.arange(B + 1, device=device) * T
    if real is not None:
        order = (~real.flatten()).int().argsort(stable=True)
        bounds, row = F.pad(real.sum(1).cumsum(0), (1, 0)), row[order]
    cuts, inner = bounds, bounds[:0]
    if real is not None:
        cuts = torch.cat([cuts, cuts.new_full((1,), number)])
    if seq_idx is not None:
        ids = seq_idx.flatten() if order is None else seq_idx.flatten()[order]
        begins = (ids[1:] != ids[:-1]) & (row[1:] == row[:-1])
        begins = F.pad(begins, (1, 0)) & (torch.arange(number, device=device) < bounds[-1])
        # offsets of a first sequence too, which is no cut within a row
        inner = linear_mixers.offsets_of_starts(begins)[:-1]
        cuts = torch.cat([cuts, inner]).sort().values
    at = torch.arange(B + 1, device=device) + torch.searchsorted(inner, bounds)
    return Rows((B, T), cuts, at[:-1], at[1:] - 1, order)


def padding_of(mask: Any, tokens: Any) -> Tensor | None:
    """bool [B, T], where there is none, of a mask of all tokens so far; None if there is none. One
    token is never padding."""
    if isinstance(mask, dict):  # of generate
        mask = mask.get("linear_attention", mask.get("conv"))
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.dim() != 2:
        return None
    real = mask[:, -tokens.shape[1] :].bool()
    if tokens.shape[1] == 1 or (not linear_mixers.is_unreadable(real) and bool(real.all())):
        return None
    return real


def _of(cache: Any, past_key_values: Any) -> Any:
    """The cache, by its name in this release or in older ones."""
    return past_key_values if cache is None else cache


def cache_call(call: Callable) -> Callable:
    """reorder_cache and reset of transformers' Cache, for the states that it does not know of."""

    @wraps(call)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        index = next((x for x in (*args, *kwargs.values())), None)
        for name in ("linear_cache", "slipstream_states"):
            states: Any = getattr(self, name, {})
            for at in range(len(states)) if isinstance(states, list) else states:
                states[at] = _moved(states[at], index)

    return replacement


def _moved(state: Any, index: Tensor | None) -> Any:
    """The rows `index` of a state or of several; zeros if None."""
    if not isinstance(state, Tensor):
        return type(state)(_moved(x, index) for x in state)
    return (
        torch.zeros_like(state) if index is None else state.index_select(0, index.to(state.device))
    )


def _scalar_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V] and g [H] or [B, T, H] as packed, state [B, H, K, V]. One
    token without gradients moves the state on in place."""
    state = None if state is None else widen(state)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g))
    if rows.size[1] == 1 and state is not None and not grads and rows.cuts is None:
        g = g.expand(q.shape[:3]) if g.dim() == 1 else g
        return recurrent_step(q, k, v, state=state, g=g, scale=scale), state
    each, all_tokens = (None, g) if g.dim() == 1 else (g, None)
    o, state = chunk_simple_gla(
        q, k, v, each, all_tokens, scale=scale, initial_state=rows.enter(state),
        output_final_state=True, cu_seqlens=rows.cuts,
    )  # fmt: skip
    return o, rows.leave(state)


def minimax(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Lightning attention: one decay a head, exp(-slope_rate)."""
    cache = _of(cache, past_key_values)
    rows = rows_of(kwargs, hidden_states, attention_mask)
    x = rows.pack(hidden_states)
    qkv = self.act_fn(self.qkv_proj(x)).unflatten(-1, (self.num_attention_heads, -1))
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    decay = -widen(self.slope_rate.flatten())
    q, k, v = qkv.chunk(3, -1)
    o, state = _scalar_decay(q, k, v, decay, state, rows, 1.0)
    o = torch.sigmoid(self.output_gate(x)) * self.norm(o.flatten(2))
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return rows.unpack(self.out_proj(o)), state


def recurrent_gemma(
    self: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Any = None,
    use_cache: bool = True,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """RG-LRU behind a short convolution; h <- a h + sqrt(1 - a^2) x of each channel, from x itself
    at position 0. The cache has the states, where transformers' own are the module's."""
    cache = _of(cache, past_key_values) if use_cache else None
    rows = rows_of(kwargs, input_states)
    held = {} if cache is None else vars(cache).setdefault("slipstream_states", {})
    window, h = held.get(id(self), (None, None))
    x, gate = rows.pack(input_states), self.rg_lru
    u, window = conv.short_convolution(
        self.linear_x(x), self.conv_1d.weight[:, 0], self.conv_1d.bias,
        initial_state=rows.enter(window), output_final_state=True, cu_seqlens=rows.cuts,
    )  # fmt: skip
    heads = u.flatten(0, 1).unflatten(-1, (gate.num_attention_heads, -1)).transpose(0, 1)

    def gated(bias: Tensor, weight: Tensor) -> Tensor:
        y = torch.baddbmm(bias[:, None], heads, weight)
        return torch.sigmoid(y.transpose(0, 1).reshape(u.shape))

    opened = gated(gate.input_gate_bias, gate.input_gate_weight)
    decayed = gated(gate.recurrent_gate_bias, gate.recurrent_gate_weight)
    g = -8.0 * widen(decayed) * F.softplus(widen(gate.recurrent_param))
    first = rows.pack(position_ids.expand(rows.size)) == 0
    if rows.cuts is not None:  # positions may count padding and other sequences
        first = first | _begins(rows, h is not None)
    first = first[..., None]
    x_t = u * opened * torch.where(first, 1.0, _clipped_sqrt(-torch.expm1(2 * g))).to(u.dtype)
    o, h = hgrn.chunk_hgrn(
        x_t, torch.where(first, -torch.inf, g), rows.enter(h), True, cu_seqlens=rows.cuts
    )
    if cache is not None:
        held[id(self)] = (rows.leave(window), rows.leave(h))
    return rows.unpack(self.linear_out(o * self.act_fn(self.linear_y(x)))), None


def _begins(rows: Rows, continued: bool) -> Tensor:
    """bool [1, B T], the first tokens of sequences; continued: not of a row's first."""
    number = rows.size[0] * rows.size[1]
    begins = torch.zeros(number + 1, dtype=torch.bool, device=rows.cuts.device)
    begins[rows.cuts] = True
    if continued:
        begins[rows.cuts[rows.first]] = False
    return begins[None, :number]


def _clipped_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) with a derivative of at most 1000."""
    root = x.detach()
    return root.sqrt() + (x - root) / (4 * root).clamp(min=1e-6).sqrt()


def rwkv_attention(
    self: Any, hidden: Tensor, state: Any = None, use_cache: bool = False
) -> tuple[Tensor, Any]:
    """WKV-4. state: of all layers [B, D, layers], those of token shifts, and a numerator, a
    denominator and the logarithm by which both are scaled."""
    rows = rows_of({}, hidden)
    k, v, r = _shifted(self, hidden, state, 1, rows, ("key", "value", "receptance"))
    before = None
    if state is not None:
        over, under, top = (widen(s[:, :, self.layer_id]) for s in state[2:])
        z = rows.enter(under.log() + top, -torch.inf)
        before = rows.enter(torch.where(under > 0, over / under, 0.0)), z
    o, after = rwkv4.chunk_rwkv4(
        -torch.exp(widen(self.time_decay)), self.time_first, self.key(k), self.value(v),
        initial_state=before, output_final_state=state is not None, cu_seqlens=rows.cuts,
    )  # fmt: skip
    if state is not None and after is not None:
        mean, z = map(rows.leave, after)
        under = (z > -torch.inf).to(mean.dtype)
        for s, new in zip(state[2:], (mean * under, under, z.clamp(min=-1e38))):
            s[:, :, self.layer_id] = new.detach()
    return rows.unpack(self.output(torch.sigmoid(self.receptance(r)) * o.to(r.dtype))), state


def rwkv_feed_forward(self: Any, hidden: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    rows = rows_of({}, hidden)
    k, r = _shifted(self, hidden, state, 0, rows, ("key", "receptance"))
    value = self.value(torch.square(torch.relu(self.key(k))))
    return rows.unpack(torch.sigmoid(self.receptance(r)) * value), state


def _shifted(
    self: Any, hidden: Tensor, state: Any, index: int, rows: Rows, names: tuple[str, ...]
) -> list[Tensor]:
    """hidden [B, T, D] mixed with the token before each, by time_mix_* of each name, packed."""
    x = rows.pack(hidden)
    before = None if state is None else state[index][:, :, self.layer_id].to(x.dtype)
    previous, last = token_shift(
        x, initial_state=rows.enter(before), output_final_state=state is not None,
        cu_seqlens=rows.cuts,
    )  # fmt: skip
    if state is not None:
        state[index][:, :, self.layer_id] = rows.leave(last).detach()
    mixes = (getattr(self, f"time_mix_{name}") for name in names)
    return [x * mix + previous * (1 - mix) for mix in mixes]


def _reorder_rwkv(self: Any, state: list[Tensor], beam_idx: Tensor) -> list[Tensor]:
    """The states of the beams that go on, for generate of transformers."""
    return _moved(state, beam_idx)


def _reorder_xlstm(self: Any, beam_idx: Tensor) -> None:
    """The states of the beams that go on, for generate of transformers."""
    self.rnn_state = {layer: _moved(state, beam_idx) for layer, state in self.rnn_state.items()}


def zaya(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    conv_mask: Tensor | None = None,
    past_key_values: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, T, H, K]: convolutions over queries and keys, values half of
    which are those of the token before."""
    cache = _of(cache, past_key_values)
    rows = rows_of({}, hidden_states, conv_mask)
    x, heads = rows.pack(hidden_states), (-1, self.head_dim)
    window = before = None
    if cache is not None and cache.has_previous_state(self.layer_idx):
        layer = cache.layers[self.layer_idx]
        window, before = layer.conv_states[0], layer.recurrent_states[0]
    q, k = self.q_proj(x), self.k_proj(x)
    mixed, window = _convolved(self, torch.cat([q, k], -1), window, rows)
    q, k = q.unflatten(-1, heads), k.unflatten(-1, heads)
    q = (q + k.repeat_interleave(self.num_key_value_groups, -2)) * 0.5
    k = q.unflatten(-2, (-1, self.num_key_value_groups)).mean(-2)
    wide = q.shape[-2] * self.head_dim
    q, k = mixed[..., :wide].unflatten(-1, heads) + q, mixed[..., wide:].unflatten(-1, heads) + k
    delayed = self.v_proj_delayed(x)
    # the token before the first is zeros, of which the projection makes its bias
    bias = self.v_proj_delayed.bias
    bias = delayed.new_zeros(delayed.shape[-1]) if bias is None else bias.to(delayed.dtype)
    number = len(x) if rows.cuts is None else len(rows.cuts) - 1
    start = rows.enter(None if before is None else before - bias)
    start = bias.expand(number, -1) if start is None else start + bias
    late, last = token_shift(
        delayed, initial_state=start.contiguous(), output_final_state=True, cu_seqlens=rows.cuts
    )
    if cache is not None:
        cache.update_conv_state(window, self.layer_idx)
        cache.update_recurrent_state(rows.leave(last), self.layer_idx)
    v = torch.cat([self.v_proj_current(x), late], -1).unflatten(-1, heads)
    return rows.unpack(q), rows.unpack(k), rows.unpack(v)


def _convolved(self: Any, x: Tensor, window: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
    """Both convolutions of x [B, T, D] as packed, and the last W inputs of each row [B, D, W];
    window: those of the call before. They, or zeros, come before each sequence."""
    width, at = self.conv_kernel_size, None
    if window is None:
        window = x.new_zeros(rows.size[0], x.shape[-1], width)
    if rows.cuts is None:
        wide = torch.cat([window.mT, x], 1)
        window = wide[:, -width:]
    else:
        number, n = x.shape[1], len(rows.cuts) - 1
        token, gap = torch.arange(number, device=x.device), torch.arange(width, device=x.device)
        at = token + width * (1 + torch.searchsorted(rows.cuts[1:].contiguous(), token, right=True))
        # where each sequence begins, and one that would follow
        begins = rows.cuts + width * torch.arange(n + 1, device=x.device)
        given = (begins[rows.first][:, None] + gap).flatten()
        wide = x.new_zeros(1, number + width * n, x.shape[-1])
        wide = wide.index_copy(1, given, window.mT.reshape(1, -1, x.shape[-1]))
        wide = wide.index_copy(1, at, x)
        window = wide[0, begins[rows.last + 1][:, None] - width + gap]
    depthwise = self.conv_qk_depthwise
    y = conv.short_convolution(wide, depthwise.weight[:, 0], depthwise.bias)[0]
    y = self.conv_qk_grouped(y[:, depthwise.kernel_size[0] - 1 :].mT).mT
    return y if at is None else y[:, at - width], window.mT


def mlstm(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Any:
    """mLSTM, [B, H, T, ...] as transformers has it: linear attention with one decay a token.

        C <- sigmoid(f) C + exp(i) k v^T      n <- sigmoid(f) n + exp(i) k
        o = K^-0.5 C^T q / max(K^-0.5 |n^T q|, 1)

    n is a last column of C, for a v of one. Both are scaled by exp(-m), the running maximum of the
    gates' sums, which only the eps of transformers' divisor can see.
    """
    q, k, v, i, f = (x.transpose(1, 2) for x in (query, key, value, igate, fgate))
    rows = rows_of({}, q)
    q, k, v, i, f = map(rows.pack, (q, k, v, i, f))
    before = None if m_initial is None else widen(m_initial).flatten(1)
    f = F.logsigmoid(widen(f))
    m, m_before, last = _running_max(f, widen(i), before, rows)
    shift = m.detach()  # scales what is divided and the divisor alike
    decay = (f.double() + m_before.detach() - shift).to(f.dtype)
    weight = torch.exp(i.double() - shift).to(f.dtype)[..., None]
    v = (torch.cat([v, torch.ones_like(v[..., :1])], -1) * weight).to(q.dtype)
    state = None
    if c_initial is not None and n_initial is not None:
        state = torch.cat([widen(c_initial), widen(n_initial)[..., None]], -1)
    o, state = _scalar_decay(q, k.to(q.dtype), v, decay, state, rows, q.shape[-1] ** -0.5)
    over, under = widen(o[..., :-1]), widen(o[..., -1:])
    divisor = torch.maximum(under.abs(), torch.exp(-shift).to(f.dtype)[..., None])
    o = over / (divisor + self.config.eps * torch.exp(m - shift).to(f.dtype)[..., None])
    h = rows.unpack(o.to(query.dtype)).transpose(1, 2)
    if return_last_states is None:
        return_last_states = self.config.return_last_states
    if "train" in (self.config.mode if mode is None else mode) and not return_last_states:
        return h
    return h, (state[..., :-1], state[..., -1], rows.leave(last)[..., None].to(f.dtype))


def _running_max(
    f: Tensor, i: Tensor, before: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(m_{t-1} + f_t, i_t) of f, i [B, T, H] as packed, in float64, m_{t-1}, and the last
    of each sequence [N, H]; before: that before a row [B, H], 0 before others and if None."""
    B, T, H = f.shape
    cuts = torch.arange(B + 1, device=f.device) * T if rows.cuts is None else rows.cuts
    token = torch.arange(B * T, device=f.device)
    owner = torch.searchsorted(cuts[1:].contiguous(), token, right=True)
    start = None if before is None else rows.enter(before.double())
    start = f.new_zeros(len(cuts) - 1, H, dtype=torch.float64) if start is None else start
    sums = F.pad(f.double().flatten(0, 1).cumsum(0), (0, 0, 1, 0))
    above = i.double().flatten(0, 1) - sums[1:]
    # each sequence above all of the ones before
    lift = owner[:, None] * (above.detach().amax() - above.detach().amin() + 1)
    highest = (above + lift).cummax(0).values - lift
    m = sums[1:] + torch.maximum(highest, (start - sums[cuts[:-1]])[owner])
    first = (token == cuts[owner])[:, None]
    m_before = torch.where(first, start[owner], m.roll(1, 0))
    last = torch.where((cuts.diff() > 0)[:, None], m[(cuts[1:] - 1).clamp(min=0)], start)
    return m.view(B, T, H), m_before.view(B, T, H), last


FORWARDS: dict[str, Callable] = {
    "MiniMaxLightningAttention": minimax,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma,
    "RwkvFeedForward": rwkv_feed_forward,
    "RwkvSelfAttention": rwkv_attention,
    "ZayaCCAProjection": zaya,
    "xLSTMBackend": mlstm,
}
# class, method and function of what a class lacks
METHODS: tuple[tuple[str, str, Callable], ...] = (
    ("RwkvForCausalLM", "_reorder_cache", _reorder_rwkv),
    ("xLSTMCache", "reorder_cache", _reorder_xlstm),
)

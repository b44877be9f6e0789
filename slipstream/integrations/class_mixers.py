"""Mixers that are classes of transformers' models with loops of their own, on our operators.

patch() puts the functions of FORWARDS in the place of forward of the classes of these names, and
METHODS into classes that define none. A function has the arguments of the forward, by its names.

rows_of() says what is packed and what is padding; a mixer packs what it reads by it and unpacks
what it returns, so that sequences stay apart and states pass padding by, on either side.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import indexed_attention
from slipstream.integrations.rows import Rows, rows_of
from slipstream.ops import conv, gla, rwkv, simple_gla, steps
from slipstream.ops._fp32 import widen
from slipstream.ops.token_shift import token_shift


def _of(cache: Any, past_key_values: Any) -> Any:
    """The cache, by its name in this release or in older ones."""
    return past_key_values if cache is None else cache


def cache_call(call: Callable) -> Callable:
    """reorder_cache and reset of transformers' Cache, for the states that it does not know of."""

    @wraps(call)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        index = next((x for x in (*args, *kwargs.values())), None)
        if index is None:  # zeros would be a state that goes on
            vars(self).pop("slipstream_states", None)
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
    if rows.one and state is not None and not grads:
        g = g.expand(q.shape[:3]) if g.dim() == 1 else g
        return steps.recurrent_step(q, k, v, state=state, g=g, scale=scale), state
    each, all_tokens = (None, g) if g.dim() == 1 else (g, None)
    o, state = simple_gla.chunk_simple_gla(
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


class _States(dict[Any, Any]):
    """Of mixers, by weak references: another may have the id of one that is gone. Those of a copy,
    or of what was saved, have numbers instead, in whose order mixers take them."""

    def __missing__(self, mixer: ref[Any]) -> tuple[Tensor | None, Tensor | None]:
        number = next((x for x in self if isinstance(x, int)), None)
        return (None, None) if number is None else self.setdefault(mixer, self.pop(number))

    def __reduce__(self) -> tuple[Any, ...]:
        return _States, (dict(enumerate(self.values())),)


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
    states = _States() if cache is None else vars(cache).setdefault("slipstream_states", _States())
    window, h = states[ref(self)]
    x, gate = rows.pack(input_states), self.rg_lru
    u, taps, bias = self.linear_x(x), self.conv_1d.weight[:, 0], self.conv_1d.bias
    if rows.one and window is not None:
        window = torch.cat([window[..., 1:], u.mT], -1)
        u = ((window * taps).sum(-1) + bias)[:, None]
    else:
        u, window = conv.short_convolution(
            u, taps, bias, initial_state=rows.enter(window), output_final_state=True,
            cu_seqlens=rows.cuts,
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
    x_t = u * opened * _clipped_sqrt(-torch.expm1(2 * g)).masked_fill(first, 1.0).to(u.dtype)
    g = g.masked_fill(first, -torch.inf)
    if rows.one and h is not None:
        last = torch.addcmul(widen(x_t[:, 0]), torch.exp(g[:, 0]), h)
        o, h = last[:, None].to(x_t.dtype), last
    else:
        o, h = gla.chunk_hgrn(x_t, g, rows.enter(h), True, cu_seqlens=rows.cuts)
    if cache is not None:
        states[ref(self)] = (rows.leave(window), rows.leave(h))
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
    if not x.requires_grad:
        return root.sqrt()
    return root.sqrt() + (x - root) / (4 * root).clamp(min=1e-6).sqrt()


def rwkv_attention(
    self: Any, hidden: Tensor, state: Any = None, use_cache: bool = False
) -> tuple[Tensor, Any]:
    """WKV-4. state: of all layers [B, D, layers], those of token shifts, and a numerator, a
    denominator and the logarithm by which both are scaled."""
    rows = rows_of({}, hidden)
    k, v, r = _shifted(self, hidden, state, 1, rows, ("key", "value", "receptance"))
    k, v, u, w = self.key(k), self.value(v), self.time_first, -torch.exp(widen(self.time_decay))
    old = None if state is None else [widen(x[:, :, self.layer_id]) for x in state[2:]]
    if old is None:
        o, _ = rwkv.chunk_rwkv4(w, u, k, v, cu_seqlens=rows.cuts)
        new = ()
    elif rows.one:
        k, v, (over, under, top) = widen(k[:, 0]), widen(v[:, 0]), old
        most = torch.maximum(top, k + u)
        past, now = torch.exp(top - most), torch.exp(k + u - most)
        o = ((past * over + now * v) / (past * under + now))[:, None]
        most = torch.maximum(top + w, k)
        past, now = torch.exp(top + w - most), torch.exp(k - most)
        new = past * over + now * v, past * under + now, most
    else:
        over, under, top = (x.clone() for x in old)  # which gradients read after new ones
        before = rows.enter(torch.where(under > 0, over / under, 0.0))
        before = before, rows.enter(under.log() + top, -torch.inf)
        o, after = rwkv.chunk_rwkv4(
            w, u, k, v, initial_state=before, output_final_state=True, cu_seqlens=rows.cuts
        )
        assert after is not None
        mean, z = map(rows.leave, after)
        under = (z > -torch.inf).to(mean.dtype)
        new = mean * under, under, z.clamp(min=-1e38)
    for x, y in zip((state or ())[2:], new):
        x[:, :, self.layer_id] = y.detach()
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
    if rows.one and before is not None:
        previous, last = before[:, None], x[:, 0]
    else:
        previous, last = token_shift(
            x, initial_state=rows.enter(before), output_final_state=state is not None,
            cu_seqlens=rows.cuts,
        )  # fmt: skip
    mixes = (getattr(self, f"time_mix_{name}") for name in names)
    mixed = [torch.lerp(previous, x, mix.to(x.dtype)) for mix in mixes]
    if state is not None:
        state[index][:, :, self.layer_id] = rows.leave(last).detach()
    return mixed


def _reorder_rwkv(self: Any, state: list[Tensor], beam_idx: Tensor) -> list[Tensor]:
    """The states of the beams that go on, for generate of transformers."""
    return _moved(state, beam_idx)


def _reorder_xlstm(self: Any, beam_idx: Tensor) -> None:
    """The states of the beams that go on, for generate of transformers."""
    self.rnn_state = {layer: _moved(state, beam_idx) for layer, state in self.rnn_state.items()}


def _minimax_length(self: Any, layer_idx: int = 0) -> int:
    """Tokens of a layer; of one that keeps a state those of the layers with keys, where
    transformers' cache says 0."""
    one = slice(layer_idx, layer_idx + 1)
    keeps_state = any(isinstance(x, Tensor) for x in self.linear_cache[one])
    layers = self.layers if keeps_state else self.layers[one]
    return max((x.get_seq_length() for x in layers), default=0)


def _minimax_mask_sizes(self: Any, query_length: int, layer_idx: int) -> tuple[int, int]:
    """Keys that a mask has, and the first of them."""
    return self.get_seq_length(layer_idx) + query_length, 0


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
    q = (q.unflatten(-2, (-1, self.num_key_value_groups)) + k[..., None, :]) * 0.5
    k, q = q.mean(-2), q.flatten(-3, -2)
    k, q = k + mixed[..., q.shape[-2] :, :], q + mixed[..., : q.shape[-2], :]
    delayed, bias = self.v_proj_delayed(x), self.v_proj_delayed.bias
    # the token before the first is zeros, of which the projection makes its bias
    start = before
    if start is None or rows.cuts is not None:
        number = len(x) if rows.cuts is None else len(rows.cuts) - 1
        bias = delayed.new_zeros(delayed.shape[-1]) if bias is None else bias.to(delayed.dtype)
        start = rows.enter(None if before is None else before - bias)
        start = bias.expand(number, -1) if start is None else start + bias
    late, last = start[:, None], delayed[:, -1]
    if rows.cuts is not None:
        start = start.contiguous()
        late, last = token_shift(
            delayed, initial_state=start, output_final_state=True, cu_seqlens=rows.cuts
        )
    elif not rows.one:
        late = torch.cat([late, delayed[:, :-1]], 1)
    v = torch.cat([self.v_proj_current(x), late], -1).unflatten(-1, heads)
    if cache is not None:
        cache.update_conv_state(window, self.layer_idx)
        cache.update_recurrent_state(rows.leave(last), self.layer_idx)
    return rows.unpack(q), rows.unpack(k), rows.unpack(v)


def _convolved(self: Any, x: Tensor, window: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
    """Both convolutions of x [B, T, D] as packed, by heads [B, T, H, K], and the last W inputs of
    each row [B, D, W]; window: those of the call before. They, or zeros, come before each
    sequence."""
    width, at, depthwise = self.conv_kernel_size, None, self.conv_qk_depthwise
    begin = depthwise.kernel_size[0] - 1
    alone = window is None and rows.cuts is None and x.shape[1] > max(begin, 1)
    before: Any = window
    if window is None and not alone:
        before = x.new_zeros(rows.size[0], x.shape[-1], width)
    if alone:  # whose zeros before the first convolution are its own
        wide, begin = F.pad(x, (0, 0, width - begin, 0)), 0
        window = wide[:, -width:]
    elif rows.cuts is None:
        wide = torch.cat([before.mT, x], 1)
        window = wide[:, -width:]
    else:
        number, n = x.shape[1], len(rows.cuts) - 1
        token, gap = torch.arange(number, device=x.device), torch.arange(width, device=x.device)
        at = token + width * (1 + torch.searchsorted(rows.cuts[1:].contiguous(), token, right=True))
        # where each sequence begins, and one that would follow
        begins = rows.cuts + width * torch.arange(n + 1, device=x.device)
        given = (begins[rows.first][:, None] + gap).flatten()
        wide = x.new_zeros(1, number + width * n, x.shape[-1])
        wide = wide.index_copy(1, given, before.mT.reshape(1, -1, x.shape[-1]))
        wide = wide.index_copy(1, at, x)
        window = wide[0, begins[rows.last + 1][:, None] - width + gap]
    if rows.one:
        y = self.conv_qk_grouped(depthwise(wide.mT)).mT.unflatten(-1, (-1, self.head_dim))
        return y, window.mT
    y = conv.short_convolution(wide, depthwise.weight.flatten(1), depthwise.bias)[0]
    y = _grouped(self.conv_qk_grouped, y if begin == 0 else y[:, begin:])
    return y if at is None else y[:, at - width], window.mT


def _grouped(conv: Any, x: Tensor) -> Tensor:
    """A convolution of groups of channels, x [B, T + W - 1, D] -> [B, T, groups, D / groups]: one
    product for all, of channels that lie beside each other, which cuDNN would move."""
    taps = x.unfold(1, conv.kernel_size[0], 1).unflatten(2, (conv.groups, -1)).flatten(-2)
    weight = conv.weight.unflatten(0, (conv.groups, -1)).flatten(2)
    bias = conv.bias.view(conv.groups, 1, -1)
    y = torch.baddbmm(bias, taps.flatten(0, 1).transpose(0, 1), weight.mT)
    return y.transpose(0, 1).unflatten(0, taps.shape[:2])


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
    states = c_initial, n_initial, m_initial
    q, k, v, i, f = (x.transpose(1, 2) for x in (query, key, value, igate, fgate))
    rows = rows_of({}, q)
    if rows.one and all(x is not None for x in states):
        h, states = _mlstm_step(query, key, value, igate, fgate, *states, self.config.eps)
        return (h, states) if _returns_states(self, mode, return_last_states) else h
    q, k, v, i, f = map(rows.pack, (q, k, v, i, f))
    before = None if m_initial is None else widen(m_initial).flatten(1)
    f = F.logsigmoid(widen(f))
    wide = f.dtype
    f, i = f.double(), i.double()
    m, m_before, last = _running_max(f, i, before, rows)
    shift = m.detach()  # scales what is divided and the divisor alike
    decay = (f + m_before.detach() - shift).to(wide)
    weight = torch.exp(i - shift).to(wide)[..., None]
    v = (F.pad(v, (0, 1), value=1.0) * weight).to(q.dtype)
    state = None
    if c_initial is not None and n_initial is not None:
        state = torch.cat([c_initial, n_initial[..., None]], -1)
    o, state = _scalar_decay(q, k.to(q.dtype), v, decay, state, rows, q.shape[-1] ** -0.5)
    o = widen(o)
    over, under = o[..., :-1], o[..., -1:]
    divisor = torch.maximum(under.abs(), torch.exp(-shift).to(wide)[..., None])
    eps = self.config.eps
    if m.requires_grad:
        eps = eps * torch.exp(m - shift).to(wide)[..., None]
    o = over / (divisor + eps)
    h = rows.unpack(o.to(query.dtype)).transpose(1, 2)
    if not _returns_states(self, mode, return_last_states):
        return h
    return h, (state[..., :-1], state[..., -1], rows.leave(last)[..., None].to(wide))


def _returns_states(self: Any, mode: str | None, return_last_states: bool | None) -> bool:
    if return_last_states is None:
        return_last_states = self.config.return_last_states
    return "train" not in (self.config.mode if mode is None else mode) or bool(return_last_states)


def _mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Any, n: Any, m: Any, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """mLSTM of one token, [B, H, 1, ...], in few operations: the host launches them one by one."""
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    f = F.logsigmoid(widen(f)) + m
    m = torch.maximum(f, i)
    old, new = torch.exp(f - m), torch.exp(i - m)
    k = k * new
    c = torch.addcmul(k[..., None] * v[..., None, :], old[..., None], c)
    n = torch.addcmul(k, old, n)
    scaled = widen(q) * q.shape[-1] ** -0.5
    under = (scaled * n).sum(-1, keepdim=True).abs()
    o = (scaled[..., None, :] @ c)[..., 0, :] / (torch.maximum(under, torch.exp(-m)) + eps)
    return o.to(q.dtype)[:, :, None], (c, n, m)


def _running_max(
    f: Tensor, i: Tensor, before: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(m_{t-1} + f_t, i_t) of f, i [B, T, H] as packed, float64, m_{t-1}, and the last of
    each sequence [N, H]; before: that before a row [B, H], 0 before others and if None."""
    B, T, H = f.shape
    cuts = torch.arange(B + 1, device=f.device) * T if rows.cuts is None else rows.cuts
    token = torch.arange(B * T, device=f.device)
    owner = torch.searchsorted(cuts[1:].contiguous(), token, right=True)
    start = None if before is None else rows.enter(before.double())
    start = f.new_zeros(len(cuts) - 1, H, dtype=torch.float64) if start is None else start
    sums = F.pad(f.flatten(0, 1).cumsum(0), (0, 0, 1, 0))
    above = i.flatten(0, 1) - sums[1:]
    # each sequence above all of the ones before
    lift = owner[:, None] * (above.detach().amax() - above.detach().amin() + 1)
    highest = (above + lift).cummax(0).values - lift
    m = sums[1:] + torch.maximum(highest, (start - sums[cuts[:-1]])[owner])
    first = (token == cuts[owner])[:, None]
    m_before = torch.where(first, start[owner], m.roll(1, 0))
    last = torch.where((cuts.diff() > 0)[:, None], m[(cuts[1:] - 1).clamp(min=0)], start)
    return m.view(B, T, H), m_before.view(B, T, H), last


FORWARDS: dict[str, Callable] = {
    **indexed_attention.FORWARDS,
    "MiniMaxLightningAttention": minimax,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma,
    "RwkvFeedForward": rwkv_feed_forward,
    "RwkvSelfAttention": rwkv_attention,
    "ZayaCCAProjection": zaya,
    "xLSTMBackend": mlstm,
}
# class, method and function of what a class lacks
METHODS: tuple[tuple[str, str, Callable], ...] = (
    ("MiniMaxCache", "get_seq_length", _minimax_length),
    ("MiniMaxCache", "get_mask_sizes", _minimax_mask_sizes),
    ("RwkvForCausalLM", "_reorder_cache", _reorder_rwkv),
    ("xLSTMCache", "reorder_cache", _reorder_xlstm),
)

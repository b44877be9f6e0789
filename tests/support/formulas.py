"""The formula of each operator around the linear family, under its own name, in any dtype. Those of
the linear family are slipstream/kernels/linear/reference.py and recurrences.py here."""

import itertools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.conv.eager import conv_reference
from slipstream.kernels.elementwise.rotary import rotary_reference
from slipstream.kernels.elementwise.token_shift import shift_reference
from slipstream.kernels.loss.eager import LossInputs, rows_reference
from slipstream.kernels.norm.eager import layer_reference, rms_reference
from slipstream.kernels.selective_scan.eager import selective_scan_reference
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.tools.catalog import Sample, flat

EPS = 1e-5


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """visible [B or 1, T, S], or by groups of heads [B or 1, G, T, S] -> o [B, T, H, DV], with
    nothing but a scale."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) * scale
    visible = visible if visible.dim() == 4 else visible[:, None]
    visible = visible.repeat_interleave(score.shape[1] // visible.shape[1], 1)
    score = score.masked_fill(~visible, float("-inf"))
    top = score.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = (score - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.einsum("bhts,bshd->bthd", p, v)


def visibility(
    q_position: Tensor, k_position: Tensor, window: tuple[int, int], k_length: Tensor | None
) -> Tensor:
    """q_position [..., T], k_position [S], k_length [..., 1, 1] of real keys -> [..., T, S]."""
    age = q_position[..., :, None] - k_position
    left, right = window
    seen = torch.ones_like(age, dtype=torch.bool)
    if left >= 0:
        seen = seen & (age <= left)
    if right >= 0:
        seen = seen & (age >= -right)
    return seen if k_length is None else seen & (k_position < k_length)


def has_formula(row: Sample) -> bool:
    return hasattr(sys.modules[__name__], row.op)


def wanted(row: Sample, args: dict[str, Any]) -> list[Tensor]:
    return flat(getattr(sys.modules[__name__], row.op)(**args, **row.options))


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    prenorm: bool = False,
) -> Any:
    h = x if residual is None else x + residual
    if weight is not None and zero_centered:
        weight = weight + 1
    y = rms_reference(h, weight, EPS)
    y = y if bias is None else y + bias
    return (y, h) if prenorm else y


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Any:
    log_p = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    live = target != -100
    chosen = log_p.gather(-1, torch.where(live, target, 0)[..., None])[..., 0]
    chosen = torch.where(live, chosen, 0)
    if not return_entropy:
        return chosen
    return chosen, torch.where(live, -(log_p.exp() * log_p).sum(-1), 0)


def attnres(
    query: Tensor,
    residuals: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    keys = rms_reference(residuals, rms_weight, 1e-6)
    p = (scale * (keys * query).sum(-1)).softmax(0)
    o = (p[..., None] * residuals).sum(0)
    return o if output_rms_weight is None else rms_reference(o, output_rms_weight, 1e-6)


def mhc_pre(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    iterations: int = 20,
    magnitude: float = 2.0,
    post_eps: float = 0.0,
) -> list[Tensor]:
    N = streams.shape[-2]
    flat = streams.flatten(-2)
    p = (flat / (flat.square().mean(-1, keepdim=True) + norm_eps).sqrt()) @ weight.mT
    pre = 1 / (1 + (-(p[..., :N] * scale[0] + base[:N])).exp()) + eps
    found = [(pre[..., None] * streams).sum(-2)]
    if len(scale) > 1:
        post = p[..., N : 2 * N] * scale[1] + base[N : 2 * N]
        found.append(magnitude / (1 + (-post).exp()) + post_eps)
    if len(scale) > 2:
        comb = (p[..., 2 * N :] * scale[2] + base[2 * N :]).unflatten(-1, (N, N)).exp()
        comb = comb / comb.sum(-1, keepdim=True) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        found.append(comb)
    return found


def mhc_post(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor | None = None) -> Tensor:
    mixed = streams if comb is None else comb.mT @ streams
    return post[..., None] * y[..., None, :] + mixed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_reference(x, weight, bias, EPS)


def l2_norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def group_norm(
    x: Tensor, weight: Tensor, num_groups: int, bias: Tensor | None = None, rms: bool = False
) -> Tensor:
    groups = x.unflatten(-1, (num_groups, -1))
    y = rms_reference(groups, None, EPS) if rms else layer_reference(groups, None, None, EPS)
    y = y.flatten(-2) * weight
    return y if bias is None else y + bias


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    f = torch.sigmoid if activation == "sigmoid" else F.silu
    if not norm_before_gate:
        x = x * f(gate)
    size = group_size or x.shape[-1]
    y = rms_reference(x.unflatten(-1, (-1, size)), None, EPS).flatten(-2) * weight
    return y * f(gate) if norm_before_gate else y


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    y, state = conv_reference(x, weight, initial_state, cu_seqlens)
    y = y if bias is None else y + bias
    y = y if activation is None else F.silu(y)
    y = y if residual is None else y + residual
    return y, state if output_final_state else None


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Any:
    B, C = (x[:, :, None] if x.dim() == 3 else x for x in (B, C))
    inputs = ScanInputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    return selective_scan_reference(inputs, delta_softplus)


def short_convolution_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, activation: str
) -> Tensor:
    assert activation == "silu"
    y, _ = conv_reference(x[:, None], weight, state, None)
    return F.silu(y + bias)[:, 0]


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> Tensor:
    cos, sin = (table[positions][:, :, None] for table in (cos, sin))
    return rotary_reference(x, cos, sin, interleaved)


def token_shift(
    x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Any:
    return shift_reference(x, initial_state, cu_seqlens)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    return up / (1 + torch.exp(-gate))


def squared_relu(x: Tensor) -> Tensor:
    return x * x * (x > 0)


def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "swiglu",
) -> Tensor:
    if up is None:
        return F.linear(squared_relu(gate), weight, bias)
    f = geglu if activation == "geglu" else swiglu
    return F.linear(f(gate, up), weight, bias)


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    return weight[input_ids]


def cross_entropy(
    logits: Tensor, target: Tensor, reduction: str = "mean", **options: Any
) -> Tensor:
    rows = rows_reference(logits, target, LossInputs(**options))
    if reduction == "none":
        return rows
    return rows.sum() / (target != -100).sum().clamp(min=1) if reduction == "mean" else rows.sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return cross_entropy(F.linear(hidden, weight, bias), target, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    selected: Tensor | None = None,
    block: int = 1,
    tail: bool = False,
) -> Tensor:
    """Sequence by sequence."""
    if cu_seqlens is not None:
        bounds = list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))
        parts = [(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in bounds]
        if key_lengths is not None:
            parts = [(q[:, a:b], k[n : n + 1], v[n : n + 1]) for n, (a, b) in enumerate(bounds)]
        lists = [None if selected is None else selected[:, a:b] for a, b in bounds]
        joined = 1
    else:
        lists = [None if selected is None else selected[n : n + 1] for n in range(q.shape[0])]
        parts = [(q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(q.shape[0])]
        joined = 0
    right = 0 if causal else -1 if window_size is None else window_size - 1
    window = (-1 if window_size is None else window_size - 1, right)
    outputs = []
    for n, (qn, kn, vn) in enumerate(parts):
        if key_lengths is not None:
            kn, vn = kn[:, : key_lengths[n]], vn[:, : key_lengths[n]]
        S, T = kn.shape[1], qn.shape[1]
        if S == 0:
            outputs.append(vn.new_zeros(1, T, q.shape[2], v.shape[3]))
            continue
        seen = visibility(torch.arange(S - T, S), torch.arange(S), window, None)[None]
        chosen = lists[n]
        if chosen is not None:
            seen = chosen_keys(chosen, S, block, tail, causal) | (seen & (window_size is not None))
        outputs.append(attention_reference(qn, kn, vn, q.shape[-1] ** -0.5, seen))
    return torch.cat(outputs, dim=joined)


def chosen_keys(selected: Tensor, keys: int, block: int, tail: bool, causal: bool) -> Tensor:
    """[1, G, T, S] by lists [1, T, G, N] of one sequence, entry by entry."""
    position = torch.arange(keys - selected.shape[1], keys)
    of_key = torch.arange(keys) // block
    seen = (selected[..., None] == of_key).any(-2).transpose(1, 2)
    if tail:
        # of the block that is not over with the query
        of_query = position[:, None] // block
        last = (position[:, None] + 1) % block == 0
        seen = seen | ((of_query == of_key) & ~last & (torch.arange(keys) <= position[:, None]))
    return seen & (position[:, None] >= torch.arange(keys)) if causal else seen


def _scores(q: Tensor, k: Tensor, weights: Tensor | None, groups: int, activation: str) -> Tensor:
    """[groups, T, S] of one sequence's q [T, HI, D] and k [S, D]."""
    x = torch.einsum("thd,sd->hts", q, k)
    x = x.relu() if activation == "relu" else x
    x = x if weights is None else x * weights.T[..., None]
    return x.unflatten(0, (groups, -1)).sum(1)


def _sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    key_lengths: Tensor | None,
    pool: str,
    block: int,
) -> list[tuple[int, slice, Tensor, int]]:
    """Row, tokens, keys or blocks, and how many keys there are, of each sequence."""
    found, T = [], q.shape[1]
    if cu_seqlens is None:
        for b in range(len(q)):
            keys = T if pool == "none" and block > 1 else k.shape[1]
            if key_lengths is not None:
                own = max(int(key_lengths[b]), 0)
                keys = own if pool == "none" else min(own, keys)
            rows = k[b] if pool == "none" else k[b, :keys]
            found.append((b, slice(0, T), rows, keys))
    else:
        at, offsets = 0, cu_seqlens.tolist()
        for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
            count = end - begin if key_lengths is None else max(int(key_lengths[n]), 0)
            if key_lengths is not None:
                count = count if pool == "none" and block > 1 else min(count, k.shape[1])
                rows = k[n] if pool == "none" else k[n, :count]
            else:
                rows = k[0, begin:end]
                if pool == "none":
                    rows = k[0, at : at + count // block]
            found.append((0, slice(begin, end), rows, count))
            at += count // block
    if pool == "mean":
        found = [
            (b, at, x[: n // block * block].unflatten(0, (n // block, block)).mean(1), n)
            for b, at, x, n in found
        ]
    return found


def index(
    q: Tensor, k: Tensor, weights: Tensor | None = None, *, topk: int, block: int = 1,
    groups: int = 1, local: int = 0, activation: str = "relu", pool: str = "max",
    causal: bool = True, cu_seqlens: Tensor | None = None, key_lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.full((*q.shape[:2], groups, topk), -1, dtype=torch.int32)
    for b, tokens, rows, keys in _sequences(q, k, cu_seqlens, key_lengths, pool, block):
        own = q[b, tokens]
        x = _scores(own, rows, None if weights is None else weights[b, tokens], groups, activation)
        for t in range(len(own)):
            p = keys - len(own) + t if causal else keys - 1
            blocks = max(p // block + 1 if pool == "max" else (p + 1) // block, 0)
            for g in range(groups):
                s = x[g, t, : p + 1] if pool == "max" else x[g, t, :blocks]
                each = s.split(block) if pool == "max" else s.split(1)
                best = [float(y.max()) for y in each[:blocks] if len(y)]
                order = sorted(range(blocks), key=lambda j: (j < blocks - local, -best[j], j))
                chosen = sorted(order[:topk])
                out[b, tokens.start + t, g, : len(chosen)] = torch.tensor(chosen)
    return out


def index_loss(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, weights: Tensor | None = None, *,
    selected: Tensor | None = None, block: int = 1, groups: int = 1, activation: str = "relu",
    pool: str = "max", scale: float | None = None, attention_scale: float | None = None,
    causal: bool = True, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (B, T), heads = q.shape[:2], queries.shape[2] // groups
    own_scale: float = q.shape[-1] ** -0.5 if scale is None else scale
    factor = queries.shape[-1] ** -0.5 if attention_scale is None else attention_scale
    keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], 2)
    total: Any = (q.sum() + k.sum() + (0 if weights is None else weights.sum())) * 0
    for b, tokens, rows, count in _sequences(q, k, cu_seqlens, None, pool, block):
        own = q[b, tokens]
        x = _scores(own, rows, None if weights is None else weights[b, tokens], groups, activation)
        for t in range(len(own)):
            p = t if causal else count - 1
            of = torch.arange(p + 1)
            entry = of if pool == "max" else of // block
            complete = p + 1 if pool == "max" else (p + 1) // block
            for g in range(groups):
                seen, listed = torch.ones(p + 1, dtype=torch.bool), torch.arange(complete)
                if selected is not None:
                    chosen = selected[b, tokens.start + t, g]
                    seen = (of[:, None] // block == chosen).any(1)
                    seen = seen & (entry < complete) if pool != "max" else seen
                    listed = entry[seen].unique()
                    seen = seen | (entry >= complete)
                if not len(listed):
                    continue
                of_heads = slice(g * heads, (g + 1) * heads)
                a = torch.einsum(
                    "hd,shd->hs",
                    queries[b, tokens][t, of_heads],
                    keys[b, tokens][: p + 1, of_heads],
                )
                a = (a * factor).masked_fill(~seen, -torch.inf).softmax(-1).mean(0).detach()
                a = torch.zeros(p + 1, dtype=a.dtype).index_add(0, entry, a)[listed]
                a = a / a.sum()
                logs = (x[g, t, listed] * own_scale).log_softmax(-1)
                total = total + (torch.special.xlogy(a, a) - a * logs).sum()
    return total / max(B * T * groups, 1)

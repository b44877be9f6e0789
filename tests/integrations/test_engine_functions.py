"""Functions that engines call by name, on packed prompts, tokens and drafts: their recurrences."""

import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import sglang_functions, vllm, vllm_calls
from tests.support.engine_plugins import forget_vllm
from tests.support.serving_checks import near

# any arguments, as engines pass them
VLLM: Any = vllm_calls
SGLANG: Any = sglang_functions
H, K, V, W = 2, 16, 8, 4
LENGTHS, BLOCKS = (5, 0, 3), torch.tensor([3, 2, 1], dtype=torch.int32)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
SPANS = [*pairwise(OFFSETS.tolist())]
T = sum(LENGTHS)
INITIAL = torch.tensor([True, False, False])


def unit(*shape: int) -> Any:
    return F.normalize(torch.randn(*shape), dim=-1)


def scan(*tensors: Any) -> tuple[Tensor, Tensor]:
    """q, k [T, H, K], v [T, H, V], g [T, H] or [T, H, K], beta [T, H]; states [H, V, K]. Returns o
    and the state after each token."""
    q, k, v, g, beta, S = tensors
    g, outputs, states = g if g.dim() == 3 else g[..., None], [], []
    for t in range(len(q)):
        S = S * g[t].exp()[:, None]
        x = v[t]
        if beta is not None:
            x = beta[t][:, None] * (x - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + x[..., None] * k[t][:, None]
        outputs.append(torch.einsum("hvk,hk->hv", S, q[t]))
        states.append(S)
    return torch.stack(outputs), torch.stack(states)


def prompts(one: Callable[..., tuple[Tensor, Tensor]], tensors: list[Any], pool: Tensor) -> Any:
    """o of all tokens and the pool behind the prompts; block 2 has none, block 0 is no one's."""
    outputs, after = [], pool.clone()
    for n, (begin, end) in enumerate(SPANS):
        if end > begin:
            block = int(BLOCKS[n])
            S = pool[block] if INITIAL[n] else torch.zeros_like(pool[block])
            o, states = one(*(None if x is None else x[begin:end] for x in tensors), S)
            outputs.append(o)
            after[block] = states[-1]
    return torch.cat(outputs), after


def delta_inputs(per_channel: bool) -> list[Tensor]:
    gates = -torch.rand(T, H, K) if per_channel else -torch.rand(T, H)
    return [unit(T, H, K), unit(T, H, K), torch.randn(T, H, V), gates, torch.rand(T, H)]


def states_of(pool: Tensor) -> Tensor:
    """What vLLM gives a call of prompts: the states of those that have one."""
    return pool[BLOCKS.long()] * INITIAL[:, None, None, None]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_prompts(per_channel: bool, raw: bool) -> None:
    q, k, v, g, beta = delta_inputs(per_channel)
    pool, rate, bias = torch.randn(5, H, V, K), torch.randn(H), torch.randn(H * K)
    given: dict[str, Any] = {"cu_seqlens": OFFSETS, "use_qk_l2norm_in_kernel": True, "scale": 0.5}
    given |= {"initial_state": states_of(pool), "output_final_state": True}
    if not per_channel:
        if raw:  # with the state after each 64 tokens; the prompts are shorter
            given |= {"state_checkpoints": torch.zeros(2, H, V, K), "checkpoint_every_n_tokens": 64}
        into = torch.full((T + 2, H, V), torch.nan)
        tokens = (x[None] for x in (3 * q, 2 * k, v, g, beta))
        o, states = VLLM.chunk_delta_rule(*tokens, core_attn_out=into, **given)
        assert torch.equal(into[:T], o[0]) and into[T:].isnan().all()
    elif raw:
        given |= {"raw_g": g[None], "raw_beta": beta[None], "A_log": rate.view(1, 1, H, 1)}
        tokens = (x[None] for x in (3 * q, 2 * k, v))
        o, states = VLLM.chunk_delta_attention(*tokens, g_bias=bias, lower_bound=-4.0, **given)
        g = -4.0 * torch.sigmoid(rate.exp()[:, None] * (g + bias.view(H, K)))
        beta = beta.sigmoid()
    else:
        tokens = (x[None] for x in (3 * q, 2 * k, v, g, beta))
        o, states = VLLM.chunk_delta_attention(*tokens, **given)
    want, after = prompts(scan, [q, k, v, g, beta], pool)
    near(o[0], 0.5 * want)
    assert states is not None
    near(states[[0, 2]], after[[3, 1]])


def test_delta_checkpoints() -> None:
    """The state after each 64 tokens, and none for the rest."""
    offsets = torch.tensor([0, 130, 194], dtype=torch.int32)
    q, k, v, g, beta = (
        unit(194, H, K),
        unit(194, H, K),
        torch.randn(194, H, V),
        -torch.rand(194, H),
        torch.rand(194, H),
    )
    kept = torch.zeros(3, H, V, K)
    VLLM.chunk_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)),
        cu_seqlens=offsets,
        state_checkpoints=kept,
        checkpoint_every_n_tokens=64,
    )
    zero = torch.zeros(H, V, K)
    first, second = (
        scan(*(x[a:b] for x in (q, k, v, g, beta)), zero)[1] for a, b in ((0, 130), (130, 194))
    )
    near(kept, torch.stack([first[63], first[127], second[63]]))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_tokens(per_channel: bool, raw: bool) -> None:
    """One of each sequence; the second has no block."""
    q, k, v, g, beta = (x[:3] for x in delta_inputs(per_channel))
    pool, blocks = torch.randn(5, H, V, K), torch.tensor([3, 0, 1], dtype=torch.int32)
    before, out = pool.clone(), torch.full((1, 3, H, V), torch.nan)
    given: dict[str, Any] = {"g": g[None], "beta": beta[None]}
    if raw:
        rate, bias = torch.randn(H), torch.randn(g[0].numel())
        given = {"raw_g": g[None], "raw_beta": beta[None], "A_log": rate, "dt_bias": bias}
        g = F.softplus(g + bias.view(g[0].shape))
        g, beta = -(rate.exp()[:, None] if per_channel else rate.exp()) * g, beta.sigmoid()
    o, _ = VLLM.recurrent(
        *(x[None] for x in (3 * q, 2 * k, v)),
        initial_state=pool,
        ssm_state_indices=blocks,
        cu_seqlens=torch.arange(4, dtype=torch.int32),
        scale=0.5,
        out=out,
        **given,
    )
    assert o is out and torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])
    for n, block in ((0, 3), (2, 1)):
        want, states = scan(*(x[n : n + 1] for x in (q, k, v, g, beta)), before[block])
        near(o[0, n], 0.5 * want[0])
        near(pool[block], states[0])


def mamba2(*tensors: Any) -> tuple[Tensor, Tensor]:
    """x, z [T, H, V], dt [T, H], B, C [T, 1, K]; states [H, V, K]."""
    x, dt, B, C, z, S, A, D = tensors
    keys, queries = (t.expand(-1, H, -1) for t in (B, C))
    o, states = scan(queries, keys, dt[..., None] * x, dt * A, None, S)
    o = o + D[:, None] * x
    return (o if z is None else o * F.silu(z)), states


@pytest.mark.parametrize("engine", ["vllm", "vllm into the pool", "sglang", "sglang's tracked"])
def test_mamba2_prompts(engine: str) -> None:
    x, dt, z = torch.randn(T, H, V), torch.randn(T, H), torch.randn(T, H, V)
    B, C, A, D, bias = (
        torch.randn(T, 1, K),
        torch.randn(T, 1, K),
        -torch.rand(H),
        *torch.randn(2, H),
    )
    pool = torch.randn(5, H, V, K)
    before, out = pool.clone(), torch.empty(T, H, V)
    given: Any = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.2, 0.9)}
    given["initial_states"] = states_of(pool)
    if engine.startswith("vllm"):
        if "pool" in engine:
            given |= {"final_states_out": pool, "final_state_indices": BLOCKS}
        rest: Any = None
        states = VLLM.mamba_chunk_scan_combined_varlen(
            x, dt, A, B, C, 64, OFFSETS, rest, rest, rest, out, **given
        )
    else:
        given |= {"z": z[None], "out": out[None], "cu_seqlens": OFFSETS}
        given |= {"return_track_states": "tracked" in engine, "state_dtype": torch.float64}
        states = SGLANG.mamba_chunk_scan_combined(
            *(t[None] for t in (x, dt)), A, B[None], C[None], 64, return_varlen_states=True, **given
        )
        states = states[1] if "tracked" in engine else states
        assert states.dtype == torch.float64
    steps = F.softplus(dt + bias).clamp(0.2, 0.9)
    want, after = prompts(lambda *given: mamba2(*given, A, D), [x, steps, B, C, z], before)
    near(out, want)
    near(pool if states is None else states[[0, 2]], after if states is None else after[[3, 1]])


def test_mamba1_prompts() -> None:
    channels, S = 6, 4
    u, delta, z = torch.randn(3, channels, T)
    B, C, A = torch.randn(S, T), torch.randn(S, T), -torch.rand(channels, S)
    D, bias, pool = torch.randn(channels), torch.randn(channels), torch.randn(5, channels, S)
    before = pool.clone()

    def one(u: Tensor, step: Tensor, B: Tensor, C: Tensor, z: Tensor, h: Tensor) -> Any:
        outputs, states = [], []
        for t in range(len(u)):
            h = h * (step[t][:, None] * A).exp() + (step[t] * u[t])[:, None] * B[t]
            outputs.append((h @ C[t] + D * u[t]) * F.silu(z[t]))
            states.append(h)
        return torch.stack(outputs), torch.stack(states)

    y = VLLM.selective_scan_fn(u, pool, delta, A, B, C, D, z, bias, True, OFFSETS, BLOCKS, INITIAL)
    step = F.softplus(delta.mT + bias)
    want, after = prompts(one, [u.mT, step, B.mT, C.mT, z.mT], before)
    near(y.mT, want)
    near(pool, after)


@pytest.mark.parametrize("activation", [None, "silu", True])
def test_convolved_prompts(activation: str | bool | None) -> None:
    x, weight, bias, pool = (
        torch.randn(6, T),
        torch.randn(6, W),
        torch.randn(6),
        torch.randn(5, 6, W),
    )
    before = pool.clone()

    def one(x: Tensor, window: Tensor) -> Any:
        tokens = torch.cat([window[:, : W - 1], x.mT], 1)
        y = F.conv1d(tokens[None], weight[:, None], bias, groups=6)[0].mT
        return (F.silu(y) if activation else y), tokens[None, :, 1 - W :]

    y = VLLM.causal_conv1d_fn(x, weight, bias, pool, OFFSETS, BLOCKS, INITIAL, activation)
    want, after = prompts(
        lambda x, window: (lambda o, s: (o, F.pad(s, (0, 1))))(*one(x, window)), [x.mT], before
    )
    near(y.mT, want)
    near(pool[..., : W - 1], after[..., : W - 1])
    assert torch.equal(pool[..., W - 1], before[..., W - 1])


@pytest.mark.parametrize("decodes", [0, 2])
def test_lightning_batches(decodes: int) -> None:
    """Tokens that decode come first, of blocks 4 and none."""
    slope, pool = torch.rand(H), torch.randn(5, H, K, V)
    own = torch.tensor([4, 0], dtype=torch.int32)[:decodes]
    blocks = torch.cat([own, BLOCKS])
    q, k, v = (
        torch.randn(decodes + T, H, K),
        torch.randn(decodes + T, H, K),
        torch.randn(decodes + T, H, V),
    )
    offsets = torch.cat([torch.arange(decodes), decodes + OFFSETS]).int()
    lengths = torch.tensor([1] * decodes + [*LENGTHS])
    metadata = SimpleNamespace(
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=3,
        num_prefill_tokens=T,
        query_start_loc=offsets,
        seq_lens=lengths + torch.tensor([7] * decodes + [4, 0, 0]),
    )
    VLLM.clear_new_sequences(pool, blocks, metadata)
    assert pool[1].eq(0).all() and not pool[[0, 2, 3, 4]].eq(0).any()
    before = pool.clone()

    def decode(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, _: Any) -> Tensor:
        ends: Any = {"q_end": decodes, "slot_end": decodes}
        return VLLM.lightning_decode(q, k, v, pool, slope, slots, **ends)

    o = VLLM.lightning_prefill_and_mix(q, k, v, pool, blocks, metadata, slope, 256, decode, decode)
    g = -slope.expand(decodes + T, -1)
    tokens = [q, k, v, g, None]
    rest = [None if x is None else x[decodes:] for x in tokens]
    want, after = prompts(scan, rest, before.mT.contiguous())
    near(o[decodes:], want.flatten(1))
    if decodes:
        first, states = scan(*(None if x is None else x[:1] for x in tokens), before[4].mT)
        near(o[:1], first.flatten(1))
        after[4] = states[0]
    near(pool, after.mT)


@pytest.mark.parametrize(
    ("engine", "drafts"), [(vllm, False), (sglang_functions, False), (sglang_functions, True)]
)
def test_mamba2_tokens(engine: Any, drafts: bool) -> None:
    """The second has no slot, and SGLang's drafts leave the pool as it is."""
    N, steps, null = 3, 2 if drafts else 1, 0 if engine is vllm else -7
    slots = torch.tensor([3, null, 1], dtype=torch.int32)
    x, raw = torch.randn(N, steps, H, V), torch.randn(N, steps, H)
    B, C = torch.randn(N, steps, 1, K), torch.randn(N, steps, 1, K)
    A, D, bias = -torch.rand(H), *torch.randn(2, H)
    pool, buffer, out = torch.randn(5, H, V, K), torch.zeros(4, 3, H, V, K), torch.zeros_like(x)
    before, wide = pool.clone(), lambda t: t[..., None].expand(*t.shape, V)
    given = [x, wide(raw), A[:, None, None].expand(H, V, K), B, C]
    more: dict[str, Any] = {"out": out, "state_batch_indices": slots, "dt_softplus": True}
    more |= {} if engine is vllm else {"pad_slot_id": null}
    if drafts:
        more |= {"disable_state_update": True, "intermediate_states_buffer": buffer}
        more["intermediate_state_indices"] = torch.tensor([2, -1, 0], dtype=torch.int32)
    else:
        given = [t[:, 0] if n != 2 else t for n, t in enumerate(given)]
        more["out"] = out[:, 0]
    more |= {"D": wide(D), "dt_bias": wide(bias)}
    with pytest.raises((ValueError, NotImplementedError), match="out: want"):
        engine.selective_state_update(pool, *given, **{**more, "out": None})
    engine.selective_state_update(pool, *given, **more)
    after = before.clone()
    for n, slot, row in ((0, 3, 2), (2, 1, 0)):
        step = F.softplus(raw[n] + bias)
        want, states = mamba2(x[n], step, B[n], C[n], None, before[slot], A, D)
        near(out[n], want)
        if drafts:
            near(buffer[row, :steps], states)
        else:
            after[slot] = states[-1]
    near(pool, after)
    assert buffer[[1, 3]].eq(0).all() and buffer[:, steps:].eq(0).all()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kind", ["delta_net", "kda", "kda apart", "bailing", "mamba2"])
def test_vllm_steps(
    kind: str, normed: bool, dim_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of each sequence through convolution, recurrence and norm; the second has no block,
    and behind them there is padding."""
    for name in ("forward_context", "model_executor.layers.mamba.mamba_utils"):
        module = SimpleNamespace(is_conv_state_dim_first=lambda: dim_first)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    forget_vllm()
    from slipstream.integrations import vllm_steps

    heads, keys, values = (1, K, V) if kind in ("delta_net", "mamba2") else (H, V, V)
    sizes = [heads * keys] * 2 + [H * values]
    sizes = sizes[::-1] if kind == "mamba2" else sizes
    blocks, n = torch.tensor([3, 0, 1, 4], dtype=torch.int32), 3
    x, weight, bias = torch.randn(4, sum(sizes)), torch.randn(sum(sizes), 1, W), torch.randn(99)
    bias = bias[: sum(sizes)] if kind in ("delta_net", "mamba2") else None
    windows, states = torch.randn(5, sum(sizes), W - 1), torch.randn(5, H, values, keys)
    pools = windows.clone() if dim_first else windows.mT.contiguous(), states.clone()
    per_channel = "kda" in kind or kind == "bailing"
    a, b = torch.randn(4, H, *[keys] * per_channel), torch.randn(4, H)
    rate, shift = torch.randn(H), torch.randn(a[0].numel())
    A, D, z = -torch.rand(H), torch.randn(H), torch.randn(4, H, values)
    scales = torch.randn(H * values if kind == "mamba2" else values)
    norm: Any = SimpleNamespace(
        weight=scales, eps=1e-5, variance_epsilon=1e-5, group_size=values, activation="sigmoid"
    )
    layer: Any = SimpleNamespace(
        kv_cache=pools,
        conv1d=SimpleNamespace(weight=weight, bias=bias),
        activation="silu",
        A_log=rate,
        dt_bias=shift,
        head_k_dim=keys,
        norm=norm,
        o_norm=norm,
        norms_in_core=normed and kind in ("mamba2", "kda apart"),
        name="BailingMoeV3KimiDeltaAttention" if kind == "bailing" else "Kimi",
        A=A,
        D=D,
        tped_intermediate_size=H * values,
        tped_dt_size=H,
        tped_conv_size=sum(sizes),
        gate_lower_bound=-5.0,
    )
    parts, weights = x.split(sizes, -1), weight.split(sizes)
    for name, part in zip("qkv", weights, strict=True):
        setattr(layer, f"{name}_conv1d", SimpleNamespace(weight=part, bias=None))
    metadata: Any = SimpleNamespace(
        num_actual_tokens=n,
        num_decode_tokens=n,
        non_spec_state_indices_tensor=blocks,
        state_indices_tensor_d=blocks[:, None],
    )
    out = torch.full((4, H, values), torch.nan)
    try:
        if kind == "delta_net":
            more = {"norm_weight": scales, "norm_eps": 1e-5, "z": z, "z_activation": "sigmoid"}
            vllm_steps.delta_net_step(layer, metadata, x, b, a, out, **more if normed else {})
        elif kind == "mamba2":
            given = torch.cat([z.flatten(1), x, a], -1)
            vllm_steps._mamba2_step(layer, metadata, given, out.view(4, -1))
        else:
            names = [f"{x}_proj_states" for x in "qkv"]
            apart = dict(zip(names, parts)) if kind != "kda" else {"mixed_qkv": x}
            in_out = layer.norms_in_core  # beta is raw, and the gates are in the output
            rates = b if in_out or kind == "kda" else b.sigmoid()
            if in_out:
                out[:n] = z[:n]
            given = (-F.softplus(a) if kind == "bailing" else a)[None], rates[None], out[None]
            gates = z.flatten(1) if normed and not in_out else None
            vllm_steps.delta_attention_step(layer, metadata, *given, g2=gates, **apart)
    finally:
        forget_vllm()
    raw = a + shift.view(a[0].shape)
    g = -(rate.exp()[:, None] if per_channel else rate.exp()) * F.softplus(raw)
    if kind == "bailing":
        g = -F.softplus(a)
    elif per_channel:
        g = -5.0 * torch.sigmoid(rate.exp()[:, None] * raw)
    assert out[n:].isnan().all()
    after = pools[0] if dim_first else pools[0].mT
    near(after[[0, 2, 4]], windows[[0, 2, 4]])
    near(pools[1][[0, 2, 4]], states[[0, 2, 4]])
    for i in (0, 2):
        block = int(blocks[i])
        tokens = torch.cat([windows[block], x[i][:, None]], -1)
        near(after[block], tokens[:, 1:])
        y = F.silu((tokens * weight[:, 0]).sum(-1) + (0 if bias is None else bias))
        first, second, third = y.split(sizes)
        if kind == "mamba2":
            u = first.view(1, H, values)
            given = u, F.softplus(raw[i : i + 1]), second.view(1, 1, K), third.view(1, 1, K)
            want, state = mamba2(*given, None, states[block], A, D)
            if normed:
                gated = (want * F.silu(z[i])).flatten(1)
                want = rms(gated.view(1, H, values), scales.view(H, values), 1e-5)
        else:
            q, k = (
                F.normalize(t.view(1, heads, keys), dim=-1).expand(1, H, -1)
                for t in (first, second)
            )
            given = q, k, third.view(1, H, values), g[i : i + 1], b[i : i + 1].sigmoid()
            want, state = scan(*given, states[block])
            want = want * keys**-0.5
            want = rms(want, scales, 1e-5) * z[i].sigmoid() if normed else want
        near(out[i], want[0])
        near(pools[1][block], state[0])


def test_vllm_writes_blocks_of_sequences_with_tokens() -> None:
    """Block 0 is no one's."""
    got = VLLM.written(torch.tensor([0, 1, 2, -1, 7]), torch.tensor([0, 3, 5, 5, 6]))
    assert got.tolist() == [-1, 1, -1, -1]


def test_sglang_lightning_tokens() -> None:
    """One of each sequence; the second has no slot."""
    q, k, v, pool, rate = *torch.randn(3, 2, H, V), torch.randn(5, H, V, V), torch.rand(H)
    meta: Any = SimpleNamespace(mask=None, batch_size=2, s_offsets=torch.tensor([3, -1]))
    before = pool.clone()
    o = SGLANG.seg_la_fwd(q, k, v, pool, rate, meta, softmax_scale=1.0)
    g = -rate.expand(2, H)
    want, states = scan(q[:1], k[:1], v[:1], g[:1], None, before[3].mT)
    near(o[0], want[0])
    near(pool[3], states[0].mT)
    near(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_vllm_normalises_keys_where_asked() -> None:
    q, k, v = (x[None] for x in torch.randn(3, T, H, V))
    g, beta = -torch.rand(1, T, H, V), torch.rand(1, T, H) / 9
    for given, at in (
        ({}, (q, k)),
        ({"use_qk_l2norm_in_kernel": True}, (F.normalize(q, dim=-1), F.normalize(k, dim=-1))),
    ):
        o, _ = VLLM.chunk_delta_attention(q, k, v, g, beta, 1.0, **given)
        want, _ = scan(*(x[0] for x in (*at, v, g, beta)), torch.zeros(H, V, V))
        near(o[0], want)

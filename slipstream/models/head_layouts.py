"""The division of each mixer's and MLP's parameters into heads, for tensor parallelism.

A Layout says of a parameter which dimension has the heads, and which blocks of it have heads of
their own: the rows of qkv_proj are those of all queries, then all keys, then all values, and each
rank has a part of each. Parameters that are not named are the same on every rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from slipstream import layers
from slipstream.nn import GatedMLP


class Layout(NamedTuple):
    """dim: which has the blocks. blocks: their sizes. whole: the numbers of those that every rank
    has all of."""

    dim: int
    blocks: tuple[int, ...]
    whole: tuple[int, ...] = ()


class Heads(NamedTuple):
    """layouts: by the parameter's name. counts: attributes that a rank has a part of, numbers or
    lists of numbers. across: the norm of the output goes over all heads."""

    layouts: dict[str, Layout]
    counts: tuple[str, ...]
    across: bool = False


def rows(*blocks: int, whole: tuple[int, ...] = ()) -> Layout:
    return Layout(0, blocks, whole)


def _linear(name: str, *blocks: int, whole: tuple[int, ...] = ()) -> dict[str, Layout]:
    """The layout of a linear layer or a convolution whose outputs have heads."""
    return {f"{name}.{x}": rows(*blocks, whole=whole) for x in ("weight", "bias")}


def _attention(m: Any, ranks: int) -> Heads:
    q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    found = _linear("qkv_proj", q, kv, kv) | _linear("g_proj", q) | _linear("f_proj", m.num_heads)
    return Heads(found, ("num_heads", "num_kv_heads"))


def _separate(m: Any, ranks: int) -> Heads:
    """MultiScaleRetention and GatedLinearAttention."""
    q, k, v = m.channels
    found = _linear("q_proj", q) | _linear("k_proj", k) | _linear("v_proj", v)
    found |= _linear("g_proj", m.o_proj.in_features) | _linear("gk_up", k)
    found |= _linear("conv", q, k, v)
    return Heads(found, ("num_heads", "num_kv_heads", "channels"))


def _delta(m: Any, gates: dict[str, Layout], decays: int, biases: int) -> Heads:
    """gates: layouts of what a layer has beside q, k, v and z; decays: of A_log, biases of
    dt_bias."""
    blocks, H = (m.keys, m.keys, m.values), m.num_heads
    found = _linear("qkv_proj", *blocks) | _linear("conv", *blocks) | _linear("z_proj", m.values)
    found |= {"A_log": rows(decays), "dt_bias": rows(biases)} | gates
    found |= _linear("preconditioner.ab_proj", H, H)
    found |= {f"preconditioner.{name}": rows(H) for name in ("A_log", "dt_bias", "centre")}
    return Heads(found, ("num_heads", "num_v_heads", "keys", "values"))


def _gated_deltanet(m: Any, ranks: int) -> Heads:
    HV = m.num_v_heads
    return _delta(m, _linear("ab_proj", HV, HV), HV, HV)


def _comba(m: Any, ranks: int) -> Heads:
    H, HV = m.num_heads, m.num_v_heads
    gates = _linear("ab_proj", HV, HV) | {"erase": rows(H), "correction": rows(H)}
    return _delta(m, gates, HV, HV)


def _kda(m: Any, ranks: int) -> Heads:
    HV, gates = m.num_v_heads, m.num_v_heads * m.head_dim
    found = _linear("f_up", gates) | _linear("b_proj", HV) | _linear("g_up", m.values)
    return _delta(m, found, HV, gates)


def _gdn2(m: Any, ranks: int) -> Heads:
    found = _linear("f_up", m.keys) | _linear("bw_proj", m.keys, m.values)
    return _delta(m, found | _linear("g_up", m.values), m.num_heads, m.keys)


def _gated_oja(m: Any, ranks: int) -> Heads:
    HV, V = m.num_v_heads, m.values
    found = _linear("f_up", V) | _linear("b_proj", HV) | _linear("g_up", V)
    return _delta(m, found, HV, V)


def _delta_net(m: Any, ranks: int) -> Heads:
    H, keys, values = m.num_heads, m.num_heads * m.head_dim, m.num_heads * m.head_v_dim
    found = _linear("qkv_proj", keys, keys, values) | _linear("conv", keys, keys, values)
    return Heads(found | _linear("b_proj", H) | _linear("g_proj", values), ("num_heads",))


def _gated_deltaproduct(m: Any, ranks: int) -> Heads:
    n, HV, keys = m.num_householder, m.num_v_heads, m.sizes[0]
    values = HV * m.head_v_dim
    blocks = (keys, *[keys] * n, *[values] * n)
    found = _linear("qkv_proj", *blocks) | _linear("conv", *blocks) | _linear("z_proj", values)
    found |= _linear("a_proj", HV) | _linear("b_proj", *[HV] * n)
    found |= {"A_log": rows(HV), "dt_bias": rows(HV)}
    return Heads(found, ("num_heads", "num_v_heads", "sizes"))


def _rwkv(m: Any, ranks: int) -> Heads:
    """RWKV4, RWKV6 and RWKV7."""
    size = m.o_proj.in_features
    found = {f"{name}_proj.weight": rows(size) for name in "rkvg"}
    for name in ("w_lora", "a_lora", "v_lora", "g_lora"):
        found |= {f"{name}.up": Layout(1, (size,)), f"{name}.bias": rows(size)}
    for name in ("k_k", "k_a", "norm_weight", "norm_bias", "decay"):
        found[name] = rows(size)
    for name in ("r_k", "bonus"):
        parameter = getattr(m, name, None)
        if parameter is not None:
            found[name] = rows(parameter.shape[0])
    return Heads(found, ("num_heads",) if hasattr(m, "num_heads") else ())


def _groups(m: Any, ranks: int) -> bool:
    """Whether each rank has groups of its own, of heads that share keys and queries.

    Raises:
        ValueError: they are several, and no multiple of the ranks.
    """
    if m.n_groups > 1 and m.n_groups % ranks:
        raise ValueError(f"n_groups: want 1 or a multiple of {ranks} ranks, got {m.n_groups}")
    return m.n_groups > 1


def _mamba2(m: Any, ranks: int) -> Heads:
    apart, H, inner = _groups(m, ranks), m.num_heads, m.inner
    groups = m.n_groups * m.state_size
    found = _linear("in_proj", inner, inner, groups, groups, H, whole=() if apart else (2, 3))
    found |= _linear("conv", inner, groups, groups, whole=() if apart else (1, 2))
    found |= {name: rows(H) for name in ("A_log", "dt_bias")}
    found |= {"D": rows(m.D.shape[0]), "norm_weight": rows(inner)}
    counts = ("num_heads", "inner", *(["n_groups"] if apart else []))
    return Heads(found, counts, across=not apart)


def _mamba3(m: Any, ranks: int) -> Heads:
    apart, H, inner = _groups(m, ranks), m.num_heads, m.inner
    groups = [m.n_groups * m.state_size] * (2 * m.mimo_rank)
    blocks, last = [inner, inner, *groups, H, H, H, m.pairs], len(groups) + 5
    whole = (last,) if apart else (*range(2, 2 + len(groups)), last)
    found = _linear("in_proj", *blocks, whole=whole)
    for name in ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "norm_weight"):
        found[name] = rows(H)
    return Heads(found, ("num_heads", "inner", *(["n_groups"] if apart else [])))


def _hgrn(m: Any, ranks: int) -> Heads:
    """HGRN, whose heads are its channels."""
    size = m.o_proj.in_features
    found = {f"{name}_proj.weight": rows(size) for name in "ifg"}
    return Heads(found | {"norm_weight": rows(size)}, (), across=True)


def _hgrn2(m: Any, ranks: int) -> Heads:
    size = m.o_proj.in_features
    found = {f"{x}_proj.weight": rows(getattr(m, f"{x}_proj").out_features) for x in "qfi"}
    return Heads(found | {"norm_weight": rows(size)}, ("num_heads",), across=True)


def _gsa(m: Any, ranks: int) -> Heads:
    found = {f"{x}_proj.weight": rows(getattr(m, f"{x}_proj").out_features) for x in "qkvf"}
    found["norm_weight"] = rows(m.o_proj.in_features)
    return Heads(found, ("num_heads", "num_kv_heads"), across=True)


def _lightning(m: Any, ranks: int) -> Heads:
    size = m.o_proj.in_features
    found = _linear("qkv_proj", size, size, size) | _linear("g_proj", size)
    return Heads(found | {"norm_weight": rows(size)}, ("num_heads",), across=True)


def _lightnet(m: Any, ranks: int) -> Heads:
    q, k, v = m.channels
    found = _linear("q_proj", q) | _linear("k_proj", k) | _linear("v_proj", v)
    found |= _linear("g_up", v) | _linear("conv", q, k, v) | {"norm_weight": rows(v)}
    return Heads(found, ("num_heads", "channels"), across=True)


def _mla(m: Any, ranks: int) -> Heads:
    found = _linear("q_proj", m.q_proj.out_features)
    return Heads(found | _linear("kv_b_proj", m.kv_b_proj.out_features), ("num_heads",))


def _gated_mlp(m: Any, ranks: int) -> Heads:
    size = m.down_proj.in_features
    found = _linear("gate_proj", size) | _linear("up_proj", size)
    return Heads(found | {"down_proj.weight": Layout(1, (size,))}, ())


def _channel_mix(m: Any, ranks: int) -> Heads:
    size = m.value.in_features
    return Heads({"key.weight": rows(size), "value.weight": Layout(1, (size,))}, ())


KINDS: tuple[tuple[type[nn.Module], Callable[[Any, int], Heads]], ...] = (
    (layers.Attention, _attention),  # ForgettingAttention, too
    (layers.MultiScaleRetention, _separate),
    (layers.GatedLinearAttention, _separate),
    (layers.GatedDeltaNet, _gated_deltanet),  # PrecondGatedDeltaNet, too
    (layers.KimiDeltaAttention, _kda),  # PrecondKDA, too
    (layers.GatedDeltaNet2, _gdn2),
    (layers.GatedOja, _gated_oja),
    (layers.Comba, _comba),
    (layers.DeltaNet, _delta_net),
    (layers.GatedDeltaProduct, _gated_deltaproduct),
    (layers.RWKV4, _rwkv),
    (layers.RWKV6, _rwkv),
    (layers.RWKV7, _rwkv),
    (layers.Mamba2, _mamba2),
    (layers.Mamba3, _mamba3),
    (layers.HGRN, _hgrn),
    (layers.HGRN2, _hgrn2),
    (layers.GatedSlotAttention, _gsa),
    (layers.LightningAttention, _lightning),
    (layers.LightNetAttention, _lightnet),
    (layers.MLA, _mla),
    (GatedMLP, _gated_mlp),
    (layers.RWKV7ChannelMix, _channel_mix),
)
"""A later class is not one of an earlier one."""


def heads_of(module: nn.Module, ranks: int) -> Heads | None:
    """None for a module that is no mixer or MLP of ours.

    Raises:
        ValueError: its heads are not a multiple of the ranks.
    """
    for kind, find in KINDS:
        if isinstance(module, kind):
            found = find(module, ranks)
            break
    else:
        return None
    for name in ("o_proj", "out_proj"):  # which read the heads
        layer = getattr(module, name, None)
        if layer is not None:
            found.layouts[f"{name}.weight"] = Layout(1, (layer.in_features,))
    for name in found.counts:
        n = getattr(module, name)
        if isinstance(n, int) and n % ranks:
            raise ValueError(
                f"{type(module).__name__}: {name}: want a multiple of {ranks} ranks, got {n}"
            )
    for name, layout in found.layouts.items():
        wrong = [n for i, n in enumerate(layout.blocks) if i not in layout.whole and n % ranks]
        if wrong and has_parameter(module, name):
            raise ValueError(
                f"{type(module).__name__}: {name}: want multiples of {ranks} ranks, got {wrong}"
            )
    return found


def has_parameter(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    for part in owner.split(".") if owner else ():
        child = module._modules.get(part)
        if child is None:
            return False
        module = child
    return module._parameters.get(last) is not None

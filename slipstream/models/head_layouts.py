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


Sizes = int | tuple[int, ...] | Layout


def _heads(sizes: dict[str, Sizes], *counts: str, across: bool = False) -> Heads:
    """Heads of what `sizes` names: parameters, or linear layers and convolutions whose outputs have
    the heads. Numbers are blocks of dimension 0."""
    layouts = {}
    for name, x in sizes.items():
        layout = x if isinstance(x, Layout) else Layout(0, x if isinstance(x, tuple) else (x,))
        layouts |= dict.fromkeys((name, f"{name}.weight", f"{name}.bias"), layout)
    return Heads(layouts, counts, across)


def _attention(m: Any) -> Heads:
    q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    sizes: dict[str, Sizes] = {"qkv_proj": (q, kv, kv), "g_proj": q, "f_proj": m.num_heads}
    return _heads(sizes, "num_heads", "num_kv_heads")


def _separate(m: Any) -> dict[str, Sizes]:
    q, k, v = m.channels
    return {"q_proj": q, "k_proj": k, "v_proj": v, "conv": (q, k, v)}


def _gla(m: Any) -> Heads:
    """MultiScaleRetention and GatedLinearAttention."""
    sizes = {**_separate(m), "g_proj": m.o_proj.in_features, "gk_up": m.channels[1]}
    return _heads(sizes, "num_heads", "num_kv_heads", "channels")


def _delta(m: Any, decays: int, biases: int, **gates: Sizes) -> Heads:
    """decays: of A_log, biases of dt_bias; gates: of what a layer has beside q, k, v and z."""
    blocks = (m.keys, m.keys, m.values)
    sizes: dict[str, Sizes] = {"qkv_proj": blocks, "conv": blocks, "z_proj": m.values}
    sizes |= {"A_log": decays, "dt_bias": biases, **gates}
    return _heads(sizes, "num_heads", "num_v_heads", "keys", "values")


def _gated_deltanet(m: Any) -> Heads:
    HV = m.num_v_heads
    return _delta(m, HV, HV, ab_proj=(HV, HV), erase=m.num_heads, correction=m.num_heads)


def _kda(m: Any) -> Heads:
    HV, gates = m.num_v_heads, m.num_v_heads * m.head_dim
    return _delta(m, HV, gates, f_up=gates, b_proj=HV, g_up=m.values)


def _gdn2(m: Any) -> Heads:
    gates: dict[str, Sizes] = {"f_up": m.keys, "bw_proj": (m.keys, m.values), "g_up": m.values}
    return _delta(m, m.num_heads, m.keys, **gates)


def _delta_net(m: Any) -> Heads:
    H = m.num_heads
    return _delta(m, H, H, b_proj=H, g_proj=m.values)


def _gated_deltaproduct(m: Any) -> Heads:
    n, HV, keys = m.num_householder, m.num_v_heads, m.sizes[0]
    values = HV * m.head_v_dim
    blocks = keys, *[keys] * n, *[values] * n
    sizes: dict[str, Sizes] = {"qkv_proj": blocks, "conv": blocks, "z_proj": values, "a_proj": HV}
    sizes |= {"b_proj": (HV,) * n, "A_log": HV, "dt_bias": HV}
    return _heads(sizes, "num_heads", "num_v_heads", "sizes")


def _rwkv(m: Any) -> Heads:
    """RWKV6 and RWKV7."""
    size, heads = m.o_proj.in_features, getattr(m, "num_heads", 0)
    sizes: dict[str, Sizes] = {f"{name}_proj": size for name in "rkvg"}
    for name in ("w_lora", "a_lora", "v_lora", "g_lora"):
        sizes |= {f"{name}.up": Layout(1, (size,)), f"{name}.bias": size}
    sizes |= dict.fromkeys(("k_k", "k_a", "norm_weight", "norm_bias", "decay"), size)
    sizes |= {"r_k": heads, "bonus": heads or size}
    return _heads(sizes, *(["num_heads"] if heads else []))


def _mamba2(m: Any) -> Heads:
    apart, H, inner = m.n_groups > 1, m.num_heads, m.inner
    groups = m.n_groups * m.state_size
    sizes: dict[str, Sizes] = {"A_log": H, "dt_bias": H, "D": m.D.shape[0], "norm_weight": inner}
    sizes["in_proj"] = Layout(0, (inner, inner, groups, groups, H), () if apart else (2, 3))
    sizes["conv"] = Layout(0, (inner, groups, groups), () if apart else (1, 2))
    counts = "num_heads", "inner", *(["n_groups"] if apart else [])
    return _heads(sizes, *counts, across=not apart)


def _mamba3(m: Any) -> Heads:
    apart, H, inner = m.n_groups > 1, m.num_heads, m.inner
    groups = [m.n_groups * m.state_size] * (2 * m.mimo_rank)
    blocks, last = (inner, inner, *groups, H, H, H, m.pairs), len(groups) + 5
    whole = (last,) if apart else (*range(2, 2 + len(groups)), last)
    names = ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "norm_weight")
    sizes: dict[str, Sizes] = {"in_proj": Layout(0, blocks, whole), **dict.fromkeys(names, H)}
    return _heads(sizes, "num_heads", "inner", *(["n_groups"] if apart else []))


def _across(m: Any, projections: str, *counts: str) -> Heads:
    """Layers with a norm of the whole output, by the first letters of their projections."""
    sizes = {f"{x}_proj": getattr(m, f"{x}_proj").out_features for x in projections}
    return _heads(sizes | {"norm_weight": m.o_proj.in_features}, *counts, across=True)


def _lightning(m: Any) -> Heads:
    size = m.o_proj.in_features
    sizes: dict[str, Sizes] = {"qkv_proj": (size,) * 3, "g_proj": size, "norm_weight": size}
    return _heads(sizes, "num_heads", across=True)


def _mla(m: Any) -> Heads:
    sizes = {x: getattr(m, x).out_features for x in ("q_proj", "kv_b_proj")}
    return _heads(sizes, "num_heads")


def _gated_mlp(m: Any) -> Heads:
    size = m.down_proj.in_features
    return _heads({"gate_proj": size, "up_proj": size, "down_proj.weight": Layout(1, (size,))})


def _channel_mix(m: Any) -> Heads:
    return _heads({"key": m.key.out_features, "value.weight": Layout(1, (m.value.in_features,))})


KINDS: tuple[tuple[type[nn.Module], Callable[[Any], Heads]], ...] = (
    (layers.Attention, _attention),  # ForgettingAttention, too
    (layers.MultiScaleRetention, _gla),
    (layers.GatedLinearAttention, _gla),
    (layers.GatedDeltaNet, _gated_deltanet),
    (layers.KimiDeltaAttention, _kda),
    (layers.GatedDeltaNet2, _gdn2),
    (layers.Comba, _gated_deltanet),
    (layers.DeltaNet, _delta_net),
    (layers.GatedDeltaProduct, _gated_deltaproduct),
    (layers.RWKV6, _rwkv),
    (layers.RWKV7, _rwkv),
    (layers.Mamba2, _mamba2),
    (layers.Mamba3, _mamba3),
    (layers.HGRN, lambda m: _across(m, "ifg")),
    (layers.HGRN2, lambda m: _across(m, "qfi", "num_heads")),
    (layers.GatedSlotAttention, lambda m: _across(m, "qkvf", "num_heads", "num_kv_heads")),
    (layers.LightningAttention, _lightning),
    (layers.MLA, _mla),
    (GatedMLP, _gated_mlp),
    (layers.RWKV7ChannelMix, _channel_mix),
)
"""A later class is not one of an earlier one."""


def heads_of(module: nn.Module, ranks: int) -> Heads | None:
    """None for a module that is no mixer or MLP of ours.

    Raises:
        ValueError: its heads, or n_groups above 1, are not a multiple of the ranks.
        NotImplementedError: it has an indexer.
    """
    if hasattr(module, "index_proj"):
        raise NotImplementedError(f"{type(module).__name__}: its indexer's heads stay whole")
    for kind, find in KINDS:
        if isinstance(module, kind):
            found = find(module)
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
            want = "1 or a multiple" if name == "n_groups" else "a multiple"
            raise ValueError(
                f"{type(module).__name__}: {name}: want {want} of {ranks} ranks, got {n}"
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

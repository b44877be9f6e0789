"""Every layer at a few channels, with its options."""

import ast
from typing import Any

import torch

from slipstream import layers
from slipstream.layers import Mixer

D, H = 24, 2
# by the layer's name and what is other about it
OPTIONS = {
    "MultiScaleRetention": "",
    "MultiScaleRetention-affine": "norm_affine=True",
    "MultiScaleRetention-grouped": (
        "num_heads=4 num_kv_heads=2 feature_map=relu2 conv_size=3 conv_bias=True use_gate=False"
    ),
    "GatedLinearAttention": "",
    "GatedLinearAttention-grouped": (
        "num_heads=4 num_kv_heads=2 feature_map=sigmoid conv_size=3 conv_bias=True "
        "gate_activation=sigmoid clamp_min=-0.1"
    ),
    "GatedLinearAttention-plain": "use_gate=False norm_affine=False",
    "GatedDeltaNet": "",
    "GatedDeltaNet-grouped": "num_v_heads=4 head_dim=6 head_v_dim=5",
    "GatedDeltaNet-plain": "use_gate=False conv_bias=True allow_neg_eigval=True",
    "GatedDeltaNet-unconvolved": "conv_size=None gate_activation=sigmoid",
    "KimiDeltaAttention": "head_v_dim=10",
    "KimiDeltaAttention-unconvolved": "conv_size=None gate_low_rank_dim=5",
    "KimiDeltaAttention-bounded": (
        "num_v_heads=4 head_dim=6 head_v_dim=5 conv_bias=True gate_bias=True "
        "allow_neg_eigval=True lower_bound=-3.0"
    ),
    "GatedDeltaNet2": "num_v_heads=4 head_dim=6 head_v_dim=5 gate_bias=True",
    "GatedDeltaNet2-unconvolved": "conv_size=None allow_neg_eigval=True",
    "RWKV7": "",
    "RWKV7-later": "layer_idx=1 num_layers=3",
    "Mamba2": "state_size=7 n_groups=2",
    "Mamba2-limited": "state_size=7 use_bias=True dt_limit=(0.01,2.0)",
    "Mamba2-unnormed": "state_size=7 conv_bias=False D_per_channel=True norm=False",
    "Mamba2-normed before": "state_size=7 norm_before_gate=True",
    "Mamba3": "state_size=8 n_groups=2",
    "Mamba3-mimo": "state_size=8 mimo_rank=3 rotary_fraction=1.0 use_bias=True",
    "Mamba3-normed": "state_size=8 output_norm=True A_activation=heavy_tail",
    "Mamba3-mimo-normed": "state_size=8 mimo_rank=2 output_norm=True",
    "DeltaNet": "head_v_dim=5",
    "DeltaNet-relu": "qk_activation=relu conv_bias=True use_beta=False",
    "DeltaNet-elu": "qk_activation=elu_plus_one qk_norm=sum conv_size=None",
    "DeltaNet-unconvolved": "conv_size=None",
    "DeltaNet-gated": "use_gate=True allow_neg_eigval=True",
    "GatedDeltaProduct": "num_v_heads=4 head_dim=6 head_v_dim=5 num_householder=3",
    "Comba": "num_v_heads=4 head_dim=6 head_v_dim=5",
    "HGRN": "expand=1.5 lower_bound=0.3",
    "HGRN2": "head_dim=7",
    "GatedSlotAttention": "num_heads=4 num_kv_heads=2 num_slots=5",
    "RWKV6": "mix_low_rank_dim=3 decay_low_rank_dim=5",
    "LightningAttention": "layer_idx=1 num_layers=3 head_dim=7",
    "Attention": "",
    "Attention-grouped": (
        "num_heads=4 num_kv_heads=2 rotary_dim=4 qk_norm=True window_size=5 qkv_bias=True"
    ),
    "Attention-gated": "qk_norm=zero_centered_rms output_gate=True",
    "ForgettingAttention": "",
    "ForgettingAttention-grouped": (
        "num_heads=4 num_kv_heads=2 window_size=5 qkv_bias=True qk_norm=True output_gate=True"
    ),
    "MLA-unturned": "kv_lora_rank=10 nope_head_dim=6 rope_head_dim=4 v_head_dim=5 rotary_base=None",
    "MLA": "kv_lora_rank=10 nope_head_dim=6 rope_head_dim=4 v_head_dim=5",
    "MLA-low-rank": (
        "q_lora_rank=7 kv_lora_rank=10 nope_head_dim=6 rope_head_dim=4 v_head_dim=8 mode=chunk"
    ),
    "QSA": "block=4 topk=3 index_dim=12",
    "QSA-grouped": (
        "num_heads=4 num_kv_heads=2 rotary_dim=4 block=1 topk=7 index_heads=2 index_dim=6 "
        "qk_norm=zero_centered_rms output_gate=True"
    ),
    "DSA": (
        "kv_lora_rank=10 nope_head_dim=6 rope_head_dim=4 v_head_dim=5 topk=7 index_heads=3 "
        "index_dim=6"
    ),
    "DSA-low-rank": (
        "q_lora_rank=7 kv_lora_rank=10 nope_head_dim=6 rope_head_dim=4 v_head_dim=8 topk=5 "
        "index_heads=2 index_dim=4 index_interleaved=True mode=fused_recurrent"
    ),
    "MSA": "block=4 topk=4 index_dim=12",
    "MSA-grouped": (
        "num_heads=4 num_kv_heads=2 rotary_dim=4 block=4 topk=4 local=2 index_dim=6 qk_norm=True "
        "window_size=3"
    ),
}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


LAYERS = {
    name: {n: _value(x) for n, x in (word.split("=") for word in text.split())}
    for name, text in OPTIONS.items()
}


def make(name: str, **options: Any) -> Mixer:
    """A layer whose weights are all away from the values they begin with, none of them 0 or 1."""
    given = {"hidden_size": D, "num_heads": H, **LAYERS[name], **options}
    layer = getattr(layers, name.split("-")[0])(**given)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer

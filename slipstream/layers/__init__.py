"""Layers that mix tokens: one call contract (base.py), one file a layer."""

from slipstream.layers.attention import Attention as Attention
from slipstream.layers.base import Mixer as Mixer
from slipstream.layers.base import ShortConvolution as ShortConvolution
from slipstream.layers.gated_deltanet import GatedDeltaNet as GatedDeltaNet
from slipstream.layers.gla import GatedLinearAttention as GatedLinearAttention
from slipstream.layers.kda import KimiDeltaAttention as KimiDeltaAttention
from slipstream.layers.mamba2 import Mamba2 as Mamba2
from slipstream.layers.mla import MLA as MLA
from slipstream.layers.retention import MultiScaleRetention as MultiScaleRetention
from slipstream.layers.rwkv7 import RWKV7 as RWKV7

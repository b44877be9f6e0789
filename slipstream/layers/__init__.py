"""Layers that mix tokens: one call contract (base.py), a file for each family."""

from slipstream.layers.attention import Attention as Attention
from slipstream.layers.attention import ForgettingAttention as ForgettingAttention
from slipstream.layers.base import Mixer as Mixer
from slipstream.layers.base import ShortConvolution as ShortConvolution
from slipstream.layers.delta_net import Comba as Comba
from slipstream.layers.delta_net import DeltaNet as DeltaNet
from slipstream.layers.delta_net import GatedDeltaNet as GatedDeltaNet
from slipstream.layers.delta_net import GatedDeltaProduct as GatedDeltaProduct
from slipstream.layers.gla import HGRN as HGRN
from slipstream.layers.gla import HGRN2 as HGRN2
from slipstream.layers.gla import GatedLinearAttention as GatedLinearAttention
from slipstream.layers.gla import GatedSlotAttention as GatedSlotAttention
from slipstream.layers.hyper_connections import HyperConnection as HyperConnection
from slipstream.layers.hyper_connections import HyperHead as HyperHead
from slipstream.layers.kda import GatedDeltaNet2 as GatedDeltaNet2
from slipstream.layers.kda import KimiDeltaAttention as KimiDeltaAttention
from slipstream.layers.mamba import Mamba2 as Mamba2
from slipstream.layers.mamba import Mamba3 as Mamba3
from slipstream.layers.mla import MLA as MLA
from slipstream.layers.retention import LightningAttention as LightningAttention
from slipstream.layers.retention import MultiScaleRetention as MultiScaleRetention
from slipstream.layers.rwkv6 import RWKV6 as RWKV6
from slipstream.layers.rwkv7 import RWKV7 as RWKV7
from slipstream.layers.rwkv7 import RWKV7ChannelMix as RWKV7ChannelMix
from slipstream.layers.selected_attention import MSA as MSA
from slipstream.layers.selected_attention import QSA as QSA

"""Modules around attention, one theme a file. Where torch.nn has the module, its arguments, its
parameters' names and its numbers are torch's, so that a state dict of the one loads into the other.
"""

from slipstream.nn.conv import ShortConvolution as ShortConvolution
from slipstream.nn.linear import GEGLU as GEGLU
from slipstream.nn.linear import Embedding as Embedding
from slipstream.nn.linear import GatedMLP as GatedMLP
from slipstream.nn.linear import Linear as Linear
from slipstream.nn.linear import SwiGLU as SwiGLU
from slipstream.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from slipstream.nn.loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from slipstream.nn.loss import LinearKLDivLoss as LinearKLDivLoss
from slipstream.nn.norm import GatedRMSNorm as GatedRMSNorm
from slipstream.nn.norm import GroupNorm as GroupNorm
from slipstream.nn.norm import L2Norm as L2Norm
from slipstream.nn.norm import LayerNorm as LayerNorm
from slipstream.nn.norm import RMSNorm as RMSNorm
from slipstream.nn.rotary import RotaryEmbedding as RotaryEmbedding

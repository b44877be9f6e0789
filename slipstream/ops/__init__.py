"""The public operators, a module for each family."""

from slipstream.kernels.linear.prefix_states import PrefixStates as PrefixStates
from slipstream.ops.activation import geglu as geglu
from slipstream.ops.activation import glu_linear as glu_linear
from slipstream.ops.activation import sigmoid_glu as sigmoid_glu
from slipstream.ops.activation import squared_relu as squared_relu
from slipstream.ops.activation import swiglu as swiglu
from slipstream.ops.attention import attention as attention
from slipstream.ops.attention import latent_attention as latent_attention
from slipstream.ops.attnres import attnres as attnres
from slipstream.ops.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
from slipstream.ops.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from slipstream.ops.conv import short_convolution as short_convolution
from slipstream.ops.conv import short_convolution_update as short_convolution_update
from slipstream.ops.delta_rule import chunk_comba as chunk_comba
from slipstream.ops.delta_rule import chunk_delta_rule as chunk_delta_rule
from slipstream.ops.delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
from slipstream.ops.delta_rule import fused_recurrent_comba as fused_recurrent_comba
from slipstream.ops.delta_rule import fused_recurrent_delta_rule as fused_recurrent_delta_rule
from slipstream.ops.delta_rule import (
    fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule,
)
from slipstream.ops.dplr_delta_rule import chunk_dplr_delta_rule as chunk_dplr_delta_rule
from slipstream.ops.dplr_delta_rule import (
    fused_recurrent_dplr_delta_rule as fused_recurrent_dplr_delta_rule,
)
from slipstream.ops.embedding import embedding as embedding
from slipstream.ops.flash_attn import flash_attn_func as flash_attn_func
from slipstream.ops.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from slipstream.ops.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from slipstream.ops.gated_delta_product import (
    chunk_gated_delta_product as chunk_gated_delta_product,
)
from slipstream.ops.gated_delta_product import (
    fused_recurrent_gated_delta_product as fused_recurrent_gated_delta_product,
)
from slipstream.ops.gla import chunk_gla as chunk_gla
from slipstream.ops.gla import chunk_hgrn as chunk_hgrn
from slipstream.ops.gla import fused_recurrent_gla as fused_recurrent_gla
from slipstream.ops.gla import fused_recurrent_hgrn as fused_recurrent_hgrn
from slipstream.ops.gsa import chunk_gsa as chunk_gsa
from slipstream.ops.gsa import fused_recurrent_gsa as fused_recurrent_gsa
from slipstream.ops.hyper_connection import mhc_post as mhc_post
from slipstream.ops.hyper_connection import mhc_pre as mhc_pre
from slipstream.ops.indexer import index as index
from slipstream.ops.indexer import index_loss as index_loss
from slipstream.ops.kda import chunk_gdn2 as chunk_gdn2
from slipstream.ops.kda import chunk_kda as chunk_kda
from slipstream.ops.kda import fused_recurrent_gdn2 as fused_recurrent_gdn2
from slipstream.ops.kda import fused_recurrent_kda as fused_recurrent_kda
from slipstream.ops.linear_attn import chunk_linear_attn as chunk_linear_attn
from slipstream.ops.linear_attn import fused_recurrent_linear_attn as fused_recurrent_linear_attn
from slipstream.ops.loss import cross_entropy as cross_entropy
from slipstream.ops.loss import linear_cross_entropy as linear_cross_entropy
from slipstream.ops.loss import linear_kl_div as linear_kl_div
from slipstream.ops.loss import linear_log_probs as linear_log_probs
from slipstream.ops.mamba import chunk_mamba3 as chunk_mamba3
from slipstream.ops.mamba import fused_recurrent_mamba3 as fused_recurrent_mamba3
from slipstream.ops.mamba import selective_scan as selective_scan
from slipstream.ops.matmul import MatmulConfig as MatmulConfig
from slipstream.ops.matmul import matmul as matmul
from slipstream.ops.norm import group_norm as group_norm
from slipstream.ops.norm import l2_norm as l2_norm
from slipstream.ops.norm import layer_norm as layer_norm
from slipstream.ops.norm import rms_norm as rms_norm
from slipstream.ops.norm import rms_norm_gated as rms_norm_gated
from slipstream.ops.rotary import packed_positions as packed_positions
from slipstream.ops.rotary import rotary_embedding as rotary_embedding
from slipstream.ops.rotary import rotary_tables as rotary_tables
from slipstream.ops.rwkv import chunk_rwkv4 as chunk_rwkv4
from slipstream.ops.rwkv import chunk_rwkv6 as chunk_rwkv6
from slipstream.ops.rwkv import chunk_rwkv7 as chunk_rwkv7
from slipstream.ops.rwkv import fused_recurrent_rwkv4 as fused_recurrent_rwkv4
from slipstream.ops.rwkv import fused_recurrent_rwkv6 as fused_recurrent_rwkv6
from slipstream.ops.rwkv import fused_recurrent_rwkv7 as fused_recurrent_rwkv7
from slipstream.ops.simple_gla import chunk_lightning_attn as chunk_lightning_attn
from slipstream.ops.simple_gla import chunk_retention as chunk_retention
from slipstream.ops.simple_gla import chunk_simple_gla as chunk_simple_gla
from slipstream.ops.simple_gla import (
    fused_recurrent_lightning_attn as fused_recurrent_lightning_attn,
)
from slipstream.ops.simple_gla import fused_recurrent_retention as fused_recurrent_retention
from slipstream.ops.simple_gla import fused_recurrent_simple_gla as fused_recurrent_simple_gla
from slipstream.ops.steps import mixer_step as mixer_step
from slipstream.ops.steps import projection_step as projection_step
from slipstream.ops.steps import recurrent_step as recurrent_step
from slipstream.ops.steps import rwkv7_step as rwkv7_step
from slipstream.ops.steps import token_mix_step as token_mix_step
from slipstream.ops.token_shift import token_shift as token_shift
from slipstream.runtime.prefix_tree import PrefixTree as PrefixTree

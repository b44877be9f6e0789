"""Lightning attention: a constant decay for each head and layer, as in MiniMax-01's layers."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from slipstream.layers.base import Mixer, NormalLinear, expect_divisor
from slipstream.layers.call import Mixed, MixerCall
from slipstream.ops import _preprocess
from slipstream.ops import simple_gla as ops


class LightningAttention(Mixer):
    """Linear attention that decays by exp(-(8 / H) (1 - layer_idx / num_layers) h) in head h.

        q, k, v = silu(x W_qkv)
        y = (rms_norm(lightning_attn(q, k, v)) * sigmoid(x W_g)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K = V; None is D / H.
        num_layers: of the model; None makes every layer decay as the first.
        norm_eps: of the norm, whose weight is [H V].
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V].
    Source: Qin et al., Lightning Attention-2, 2024; MiniMax-01, 2025, section 2.
    """

    depends_on_layer = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        num_layers: int | None = None,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(mode, layer_idx)
        if head_dim is None:
            expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        if num_layers is not None and not layer_idx < num_layers:
            raise ValueError(
                f"num_layers: want more than layer_idx = {layer_idx}, got {num_layers}"
            )
        self.num_heads, self.num_layers, self.norm_eps = num_heads, num_layers, norm_eps
        channels = num_heads * head_dim
        self.qkv_proj = NormalLinear(hidden_size, 3 * channels)
        self.g_proj = NormalLinear(hidden_size, channels)
        self.o_proj = NormalLinear(channels, hidden_size)
        self._add_norm(channels)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv = F.silu(self.qkv_proj(x)).unflatten(-1, (3, self.num_heads, -1))
        depth = (0, 1) if self.num_layers is None else (self.layer_idx, self.num_layers)
        is_recurrent = self.recurrent(x, call.context)
        lightning = ops.fused_recurrent_lightning_attn if is_recurrent else ops.chunk_lightning_attn
        q, k, v = qkv.unbind(2)
        if self.head_shard is not None:  # the operator would take its heads for all of them
            simple = ops.fused_recurrent_simple_gla if is_recurrent else ops.chunk_simple_gla
            share, heads = 1 - depth[0] / depth[1], self.num_heads * self.head_shard.size
            decay = _preprocess.per_head(v, ops.decay_of_heads, share, self.first_head, heads)
            lightning, depth = partial(simple, g_gamma=decay), ()
        o, recurrent = lightning(q, k, v, *depth, **call.sequence(call.past("recurrent")))
        o = self._norm_of_all_heads(o.flatten(-2))
        return self.o_proj(o * self.g_proj(x).sigmoid()), call.new_state(recurrent=recurrent)

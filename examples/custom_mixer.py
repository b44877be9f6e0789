"""A mixer of your own around one operator: python examples/custom_mixer.py

A class derived from Mixer is called like every layer of slipstream: it takes packed sequences and a
state, and returns the next state, so that one class serves training, prompts and decoding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers import Mixer
from slipstream.ops import chunk_gla, fused_recurrent_gla


class TiedGateMixer(Mixer):
    """Gated linear attention whose keys are one minus the decay, so that a channel that keeps much
    writes little.

        a = sigmoid(x W_a)      S_t = diag(a_t) S_{t-1} + (1 - a_t) v_t^T      y_t = (S_t^T q_t) W_o
    """

    def __init__(self, hidden_size: int, num_heads: int, layer_idx: int = 0) -> None:
        super().__init__(layer_idx=layer_idx)
        self.num_heads = num_heads
        self.projections = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,  # [B, T, D]
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,  # for layers that look at them
        state: dict[str, Tensor] | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        heads = self.projections(x).unflatten(-1, (3 * self.num_heads, -1))
        q, v, a = heads.chunk(3, dim=2)  # [B, T, H, K] each
        g = F.logsigmoid(a)  # log decay of each channel
        # self.recurrent: token by token if x is short and no gradient is wanted
        gla = fused_recurrent_gla if self.recurrent(x) else chunk_gla
        o, last = gla(
            q,
            1 - g.exp(),
            v,
            g,
            initial_state=None if state is None else state["recurrent"],
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        return self.output(o.flatten(-2)), None if last is None else {"recurrent": last}


def main() -> float:
    """Returns how far decoding token by token is from one call."""
    torch.manual_seed(0)
    mixer, x = TiedGateMixer(hidden_size=64, num_heads=2), torch.randn(1, 40, 64)
    with torch.no_grad():
        whole, _ = mixer(x)
        y, state = mixer(x[:, :30], use_cache=True)  # the prompt
        steps = [y]
        for t in range(30, 40):
            y, state = mixer(x[:, t : t + 1], state=state, use_cache=True)
            steps.append(y)
        packed, _ = mixer(torch.cat([x, x], 1), cu_seqlens=torch.tensor([0, 40, 80]))
    apart = (torch.cat(steps, 1) - whole).abs().max().item()
    apart = max(apart, (packed[:, 40:] - whole).abs().max().item())
    print(f"one call, token by token, packed: largest difference {apart:.1e}")
    return apart


if __name__ == "__main__":
    main()

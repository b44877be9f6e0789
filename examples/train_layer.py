"""Trains one Gated DeltaNet layer on associative recall: python examples/train_layer.py

A sequence lists pairs of a key and a value, then asks for the value of one of the keys. The delta
rule stores a value under its key and reads it back, so one layer is enough.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers import GatedDeltaNet
from slipstream.nn import RMSNorm

PAIRS, SYMBOLS, WIDTH = 4, 8, 32


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # keys are 0 .. SYMBOLS - 1, values SYMBOLS .. 2 SYMBOLS - 1
        self.embedding = nn.Embedding(2 * SYMBOLS, WIDTH)
        self.mixer = GatedDeltaNet(hidden_size=WIDTH, num_heads=2)
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2 * SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> logits of the token after the last one, [B, 2 SYMBOLS]"""
        h = self.embedding(ids)
        y, _ = self.mixer(h)  # the second result is the state, with use_cache=True
        return self.head(self.norm(h + y))[:, -1]


def batch(size: int) -> tuple[Tensor, Tensor]:
    """key value key value ... key, and the value that belongs to the last key."""
    keys = torch.rand(size, SYMBOLS).argsort(1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, 2 * SYMBOLS, (size, PAIRS))
    asked = torch.randint(PAIRS, (size, 1))
    pairs = torch.stack([keys, values], 2).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


def main(steps: int = 300) -> float:
    """Returns the share of right answers on fresh sequences."""
    torch.manual_seed(0)
    model = Recall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids, answer = batch(64)
        loss = F.cross_entropy(model(ids), answer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        ids, answer = batch(512)
        right = (model(ids).argmax(-1) == answer).float().mean().item()
    print(f"right answers: {right:.0%}; guessing gives {1 / SYMBOLS:.0%}")
    return right


if __name__ == "__main__":
    main()

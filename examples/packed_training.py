"""Trains the language model on sequences of different lengths: python examples/packed_training.py

The sequences lie one after another in a batch of one. cu_seqlens says where each begins; no
sequence sees another one, and there is no padding to compute.
"""

import torch
from torch import Tensor

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

VOCABULARY = 32


def sequences(count: int) -> list[Tensor]:
    """Runs of consecutive tokens, each with its own beginning and length."""
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 24, ()))
        first = torch.randint(VOCABULARY, ())
        found.append((first + torch.arange(length)) % VOCABULARY)
    return found


def pack(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """ids [1, total] and offsets [N + 1]"""
    lengths = torch.tensor([len(x) for x in rows])
    return torch.cat(rows)[None], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def main(steps: int = 40) -> tuple[float, float]:
    """Returns the loss at the beginning and at the end."""
    torch.manual_seed(0)
    model = SlipstreamForCausalLM(
        SlipstreamConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_heads=2,
            mixers=["gated_deltanet", "attention"],
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids, cu_seqlens = pack(sequences(16))
        # labels are shifted within each sequence: its last token predicts nothing
        loss = model(ids, labels=ids, cu_seqlens=cu_seqlens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: {ids.shape[1]} tokens, loss {losses[-1]:.3f}")
    model.eval()
    with torch.no_grad():
        rows = sequences(3)
        ids, cu_seqlens = pack(rows)
        packed = model(ids, cu_seqlens=cu_seqlens).logits[0]
        alone = torch.cat([model(x[None]).logits[0] for x in rows])
    print(f"packed and alone differ by {(packed - alone).abs().max():.1e}; loss {losses[-1]:.3f}")
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()

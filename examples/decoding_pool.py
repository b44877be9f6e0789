"""Serves sequences that come and go, their states in a pool: python examples/decoding_pool.py

recurrent_step updates states in place, in a pool of slots. Rows without a sequence have slot -1.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.ops import chunk_gated_delta_rule, recurrent_step

SLOTS, BATCH, HEADS, K, V = 4, 3, 2, 16, 16
Token = dict[str, Any]  # tensors by the names of arguments


def tokens(length: int) -> Token:
    """q, k, v, g and beta of a sequence, as a model would compute them."""
    return {
        "q": torch.randn(1, length, HEADS, K),
        "k": torch.nn.functional.normalize(torch.randn(1, length, HEADS, K), dim=-1),
        "v": torch.randn(1, length, HEADS, V),
        "g": -torch.rand(1, length, HEADS),
        "beta": torch.rand(1, length, HEADS),
    }


class Server:
    def __init__(self) -> None:
        self.pool = torch.zeros(SLOTS, HEADS, K, V)
        self.free = list(range(SLOTS))

    def start(self, prompt: Token) -> int:
        """Reads a prompt in chunks; returns the slot that holds its state."""
        slot = self.free.pop()
        _, state = chunk_gated_delta_rule(**prompt, output_final_state=True)
        assert state is not None
        self.pool[slot] = state[0]
        return slot

    def step(self, batch: dict[int, Token]) -> dict[int, Tensor]:
        """One token of each running sequence, slot -> token; returns slot -> output [H, V]."""
        slots = [*batch, *[-1] * (BATCH - len(batch))]
        rows = [batch.get(x) or tokens(1) for x in slots]
        stacked: Token = {name: torch.cat([x[name] for x in rows]) for name in rows[0]}
        o = recurrent_step(**stacked, state=self.pool, state_indices=torch.tensor(slots))
        return {slot: o[i, 0] for i, slot in enumerate(slots) if slot >= 0}


def main() -> float:
    """Returns how far the served outputs are from those of whole sequences."""
    torch.manual_seed(0)
    server = Server()
    sequences = [tokens(length) for length in (30, 20, 25, 28)]
    arrivals = {0: [0, 1], 2: [2], 6: [3]}  # step -> sequences
    running: dict[int, tuple[int, int]] = {}  # slot -> (which, place)
    apart = 0.0
    for now in range(16):
        for which in arrivals.get(now, []):
            slot = server.start({x: y[:, :16] for x, y in sequences[which].items()})
            running[slot] = (which, 16)
        batch = {
            slot: {x: y[:, at : at + 1] for x, y in sequences[which].items()}
            for slot, (which, at) in running.items()
        }
        for slot, o in server.step(batch).items():
            which, at = running[slot]
            whole = chunk_gated_delta_rule(**sequences[which])[0][0, at]
            apart = max(apart, (o - whole).abs().max().item())
            running[slot] = (which, at + 1)
            if at + 1 == sequences[which]["q"].shape[1]:
                print(f"step {now}: sequence {which} ends, slot {slot} is free")
                server.free.append(slot)
                del running[slot]
    print(f"largest difference: {apart:.1e}")
    return apart


if __name__ == "__main__":
    main()

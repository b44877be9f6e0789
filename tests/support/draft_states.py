"""bench/snapshots.py beside recurrent_step, in Triton's interpreter: states after each draft.

TRITON_INTERPRET=1 python -m tests.support.draft_states bench
"""

import importlib
import sys
from typing import Any

import torch

from slipstream import ops
from tests.support.operators import relative_error

LIMIT = 1e-6


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    snapshots: Any = importlib.import_module("snapshots")
    torch.manual_seed(0)
    N, T, H, HV, K = 2, 4, 1, 2, 128
    tokens: dict[str, Any] = {"q": torch.randn(N, T, H, K), "k": torch.randn(N, T, H, K)}
    tokens |= {"v": torch.randn(N, T, HV, K), "g": -torch.rand(N, T, HV)}
    tokens["beta"] = torch.rand(N, T, HV)
    state, slots = torch.randn(N + 3, HV, K, K), torch.tensor([3, 1])
    kept = torch.empty(N, T, HV, K, K)
    o = snapshots.verify(**tokens, state=state, slots=slots, kept=kept)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "impl": "eager"}
    for count in range(1, T + 1):
        after = state.clone()
        few = {name: x[:, :count] for name, x in tokens.items()}
        want = ops.recurrent_step(**few, state=after, state_indices=slots, **options)
        assert relative_error(o[:, :count], want) < LIMIT
        assert relative_error(kept[:, count - 1], after[slots]) < LIMIT
    snapshots.accept(state, slots, kept, torch.tensor([2, 4]))
    assert torch.equal(state[slots], torch.stack([kept[0, 1], kept[1, 3]]))


if __name__ == "__main__":
    main()

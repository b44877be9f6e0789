"""consistent=True: random batches and cuts of sequences, beside each sequence alone and whole."""

import random
from typing import Any

import torch
from torch import Tensor

from slipstream.ops import attention
from slipstream.tools.catalog import Sample
from tests.support.operators import LINEAR, Args, Size, has_time

BLOCK = 64
# Tokens of the whole sequences.
LENGTH = 200
SIZE = Size(B=3, T=LENGTH, H=1, HV=2, K=16, V=16, gate="mixed")


def takes_consistent(op: Sample) -> bool:
    return "consistent" in op.takes


OPERATORS = [op for op in LINEAR if takes_consistent(op)]


def tokens_of(op: Sample, args: Args, n: int, begin: int, end: int) -> Args:
    """The arguments of some tokens of sequence n."""
    return {
        name: x[n : n + 1, begin:end] if has_time(op, name) else x
        for name, x in args.items()
        if name not in ("initial_state", "cu_seqlens")
    }


class Wanted:
    """Results of sequences alone, whole, in one call: o, and the states at every multiple of 64."""

    def __init__(self, op: Sample, args: Args, options: dict[str, Any]) -> None:
        self.op, self.args, self.options = op, args, options
        self.rows, self.states = [], []
        for n in range(args["initial_state"].shape[0]):
            initial = args["initial_state"][n : n + 1]
            self.rows.append(self.call(tokens_of(op, args, n, 0, LENGTH), initial)[0])
            states = [initial]
            for end in range(BLOCK, LENGTH, BLOCK):
                states.append(self.call(tokens_of(op, args, n, 0, end), initial)[1])
            self.states.append(states)

    def call(self, tokens: Args, state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options = {**self.options, **options, "output_final_state": True}
        return self.op.fn(**tokens, initial_state=state, **options)

    def differing(self, rng: random.Random) -> int:
        """Values that differ in one random batch: some sequences, each from one multiple of 64 on
        to any token, packed or as rows of one length; with gradients or without."""
        count = rng.randint(1, 4)
        pieces = []
        length = rng.randint(1, LENGTH)
        packed = rng.random() < 0.7
        for _ in range(count):
            n, begin = rng.randrange(len(self.rows)), BLOCK * rng.randrange(len(self.states[0]))
            end = rng.randint(begin, LENGTH) if packed else begin + length
            pieces.append((n, begin, end) if end <= LENGTH else (n, 0, length))
        parts = [tokens_of(self.op, self.args, *piece) for piece in pieces]
        dim = 1 if packed else 0
        batch = {
            name: torch.cat([part[name] for part in parts], dim) if has_time(self.op, name) else x
            for name, x in parts[0].items()
        }
        state = torch.cat([self.states[n][begin // BLOCK] for n, begin, _ in pieces])
        lengths = torch.tensor([0, *(end - begin for _, begin, end in pieces)])
        options = {"cu_seqlens": lengths.cumsum(0).int().to(state.device)} if packed else {}
        if rng.random() < 0.3:
            batch = {name: x.clone().requires_grad_() for name, x in batch.items()}
        o, final = self.call(batch, state, **options)
        want = [self.rows[n][:, begin:end] for n, begin, end in pieces]
        wrong = int((o != torch.cat(want, dim)).sum())
        for i, (n, _, end) in enumerate(pieces):
            if end % BLOCK == 0 and end < LENGTH:
                wrong += int((final[i] != self.states[n][end // BLOCK][0]).sum())
        return wrong


def differing(
    op: Sample,
    trials: int,
    impl: str | None,
    seed: int = 0,
    *,
    raw: bool = False,
    size: Size = SIZE,
    device: str = "cpu",
    **options: Any,
) -> int:
    """Values that differ in so many random batches. raw: with gates and norms in the operator."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    inputs = op.inputs(size, torch.device(device))
    args = {name: x for name, x in inputs.items() if name != "cu_seqlens"}
    if raw:
        args["g"] = torch.randn_like(args["g"])
        options |= {"A_log": torch.randn(2), "dt_bias": torch.randn(args["g"].shape[2:])}
        flags = "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"
        options |= dict.fromkeys(flags, True)
    wanted = Wanted(op, args, {"impl": impl, "consistent": True, **options})
    return sum(wanted.differing(rng) for _ in range(trials))


def attention_differing(
    trials: int,
    impl: str | None,
    seed: int = 0,
    width: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> int:
    """The same of attention: any queries of one or more sequences, and the keys up to them, packed;
    or as many of each, as rows, with keys in a cache with room."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    q, k, v = (torch.randn(3, LENGTH, n, width, device=device, dtype=dtype) for n in (2, 1, 1))
    options = {"impl": impl, "consistent": True, **options}
    rows = [attention(q[n : n + 1], k[n : n + 1], v[n : n + 1], **options) for n in range(3)]
    wrong = 0
    for _ in range(trials):
        pieces = []
        for _ in range(rng.randint(1, 3)):
            end = rng.randint(1, LENGTH)
            pieces.append((rng.randrange(3), rng.choice([end - 1, rng.randrange(end)]), end))
        want = [rows[n][:, begin:end] for n, begin, end in pieces]
        if rng.random() < 0.4:
            count = rng.choice([1, 1, 5, 64])
            ends = [rng.randint(count, LENGTH) for _ in pieces]
            which = [n for n, _, _ in pieces]
            queries = torch.cat([q[n : n + 1, end - count : end] for n, end in zip(which, ends)])
            lengths = torch.tensor(ends, dtype=torch.int32, device=device)
            o = attention(queries, k[which], v[which], key_lengths=lengths, **options)
            for n, end, row in zip(which, ends, o):
                wrong += int((row != rows[n][0, end - count : end]).sum())
            continue
        queries = torch.cat([q[n : n + 1, begin:end] for n, begin, end in pieces], 1)
        queries.requires_grad_(rng.random() < 0.3)
        keys, values = (torch.cat([x[n : n + 1, :end] for n, _, end in pieces], 1) for x in (k, v))
        of_q = torch.tensor([0, *(end - begin for _, begin, end in pieces)]).cumsum(0).int()
        of_q = of_q.to(device)
        of_k = torch.tensor([0, *(end for _, _, end in pieces)]).cumsum(0).int().to(device)
        o = attention(queries, keys, values, cu_seqlens=of_q, cu_seqlens_k=of_k, **options)
        wrong += int((o != torch.cat(want, 1)).sum())
    return wrong

"""A scheduler of random steps for vLLM's layers: prompts in chunks, prefixes that hit, drafts, rows
that are padding and sequences that lose their blocks; and what each token comes to in float64.
Pools lie as vLLM's: windows [blocks, W - 1 + drafts, C] and states in one page of memory a
block."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

W = 4


def conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """vLLM's causal_conv1d_update, by what its Triton kernel does."""
    assert not any(x is not None for x in kwargs.values()) and conv_state_indices is not None
    slots = conv_state_indices if conv_state_indices.dim() == 1 else conv_state_indices[:, 0]
    offsets = torch.arange(len(slots) + 1) if query_start_loc is None else query_start_loc
    y, width = x.clone(), weight.shape[1]
    for n, slot in enumerate(slots.tolist()):
        begin, end = offsets[n : n + 2].tolist()
        if slot == null_block_id or begin == end:
            continue
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        window = conv_state[slot, :, first : first + width - 1]
        tokens = torch.cat([window, x[begin:end].mT], 1)
        total = F.conv1d(tokens[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))
        y[begin:end] = (F.silu(total) if activation else total)[0].mT
        kept = tokens[:, end - begin :] if num_accepted_tokens is None else tokens[:, 1:]
        conv_state[slot, :, : kept.shape[1]] = kept.clone()
    return y if out is None else out.copy_(y)


@dataclass
class Pools:
    """Pools of float32 in pages, of which the rest is not a number."""

    windows: Tensor
    states: Tensor

    @classmethod
    def make(cls, blocks: int, channels: int, length: int, shape: tuple[int, ...]) -> "Pools":
        sizes = channels * length, int(torch.Size(shape).numel())
        page = torch.full((blocks, sum(sizes) + 24), float("nan"))
        windows = page[:, : sizes[0]].unflatten(1, (length, channels))
        states = page[:, sizes[0] + 8 : sum(sizes) + 8].unflatten(1, shape)
        return cls(windows, states)

    def lose(self, block: int) -> None:
        self.windows[block], self.states[block] = float("nan"), float("nan")

    def copy(self, source: int, target: int) -> None:
        self.windows[target], self.states[target] = self.windows[source], self.states[source]


@dataclass
class Sequence:
    """blocks: of the state, and with drafts of the state after each. done: tokens that the state
    has. memory: of the oracle after these, and after drafts: one for each token of the last step,
    of which `accepted` stay."""

    blocks: list[int]
    prompt: int
    total: int
    done: int = 0
    memory: list[Any] = field(default_factory=lambda: [None])
    accepted: int = 1


@dataclass
class Row:
    sequence: Sequence | None
    tokens: int
    drafts: int = -1  # of a sequence that decodes, or -1

    @property
    def is_prompt(self) -> bool:
        return self.sequence is not None and self.sequence.done < self.sequence.prompt


class Scheduler:
    """step() makes a batch, run(rows, inputs) of the layer gives its tokens, and each is compared
    with the oracle (memory, input of a token) -> (y, memory)."""

    def __init__(self, pools: Pools, drafts: int, seed: int, least: int) -> None:
        self.pools, self.drafts, self.random = pools, drafts, random.Random(seed)
        self.free = list(range(1, pools.states.shape[0]))
        self.running: list[Sequence] = []
        self.prefixes: list[tuple[int, int, Any]] = []  # block, tokens, memory
        self.least = least  # tokens of a piece of a prompt
        self.counts = dict.fromkeys(("prefix", "lost", "padding", "drafts", "prompts"), 0)

    def step(self) -> list[Row]:
        r = self.random
        need = 1 + self.drafts
        while len(self.running) < 5 and len(self.free) >= need and r.random() < 0.5:
            self.running.append(self._begin([self.free.pop() for _ in range(need)]))
        if self.running and r.random() < 0.05:
            self._lose(r.choice(self.running))
        if self.running and len(self.prefixes) < 3 and len(self.free) > need and r.random() < 0.1:
            sequence = r.choice(self.running)
            if sequence.done and sequence.accepted == 1 and len(sequence.memory) == 1:
                block = self.free.pop()
                self.pools.copy(sequence.blocks[0], block)
                self.prefixes.append((block, sequence.done, sequence.memory[0]))
        rows = [self._row(x) for x in self.running if r.random() < 0.8]
        rows.sort(key=lambda x: x.is_prompt)
        # a batch that has no draft is no batch of drafts
        if self.drafts and not any(x.drafts > 0 for x in rows):
            rows = [x for x in rows if x.is_prompt]
        if rows and not any(x.is_prompt for x in rows) and r.random() < 0.5:
            padding = r.randint(1, 3)
            rows += [Row(None, 0) for _ in range(padding)]
            self.counts["padding"] += padding
        return rows

    def _begin(self, blocks: list[int]) -> Sequence:
        r = self.random
        for block in blocks:
            self.pools.lose(block)
        sequence = Sequence(blocks, r.randint(self.least, 40), 0)
        sequence.total = sequence.prompt + r.randint(1, 30)
        if self.prefixes and r.random() < 0.4:
            block, done, memory = r.choice(self.prefixes)
            self.pools.copy(block, blocks[0])
            sequence.done, sequence.memory = done, [memory]
            sequence.prompt, sequence.total = done + sequence.prompt, done + sequence.total
            self.counts["prefix"] += 1
            if r.random() < 0.3:
                self.prefixes = [x for x in self.prefixes if x[0] != block]
                self.free.append(block)
        return sequence

    def _lose(self, sequence: Sequence) -> None:
        """Its blocks go to others, and it is computed once more."""
        self._end(sequence)
        self.counts["lost"] += 1

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        for block in sequence.blocks:
            self.pools.lose(block)
            self.free.append(block)

    def _row(self, sequence: Sequence) -> Row:
        left = sequence.prompt - sequence.done
        if left > 0:
            self.counts["prompts"] += 1
            sizes = [
                n for n in range(self.least, left + 1) if left - n == 0 or left - n >= self.least
            ]
            return Row(sequence, self.random.choice(sizes))
        drafts = self.random.randint(0, self.drafts) if self.drafts else -1
        self.counts["drafts"] += max(drafts, 0)
        return Row(sequence, 1 + max(drafts, 0), drafts)

    def check(
        self,
        rows: list[Row],
        outputs: Tensor,
        inputs: dict[str, Tensor],
        oracle: Callable[[Any, dict[str, Tensor]], tuple[Tensor, Any]],
        tolerance: float = 1e-4,
    ) -> int:
        """How many tokens are wrong. The sequences move on, by as many drafts as are accepted."""
        at = wrong = 0
        for row in rows:
            sequence = row.sequence
            if sequence is None:
                continue
            memory = sequence.memory[sequence.accepted - 1]
            memories = []
            for t in range(at, at + row.tokens):
                y, memory = oracle(memory, {n: x[t].double() for n, x in inputs.items()})
                memories.append(memory)
                error = (outputs[t].double() - y).abs().max() / y.abs().max().clamp(min=1)
                wrong += not bool(error < tolerance)
            at += row.tokens
            if row.is_prompt or row.drafts < 0:
                sequence.done += row.tokens
                sequence.memory, sequence.accepted = [memory], 1
            else:
                sequence.accepted = self.random.randint(1, row.tokens)
                sequence.done += sequence.accepted
                sequence.memory = memories
            if sequence.done >= sequence.total:
                self._end(sequence)
        return wrong


def common_metadata(module: Any, rows: list[Row], drafts: int) -> Any:
    """CommonAttentionMetadata of a batch; padding has block 0."""
    lengths = torch.tensor([x.tokens for x in rows])
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    done = torch.tensor([0 if x.sequence is None else x.sequence.done for x in rows])
    blocks = [[0] * (1 + drafts) if x.sequence is None else x.sequence.blocks for x in rows]
    seq_lens = (done + lengths).int()
    # a graph of decoding has a token for each row of padding
    padding = sum(x.sequence is None for x in rows)
    return module.CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=seq_lens,
        num_reqs=len(rows),
        num_actual_tokens=int(offsets[-1]) + padding,
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.tensor(blocks, dtype=torch.int32),
        slot_mapping=torch.zeros(0),
        is_prefilling=torch.tensor([x.is_prompt for x in rows]),
        seq_lens_cpu_upper_bound=seq_lens,
    )

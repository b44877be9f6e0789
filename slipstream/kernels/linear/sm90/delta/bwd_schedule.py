"""What the delta rule's backward goes through at a time on sm_90 (bwd_fused.py), by shapes alone.

A head of a sequence is one program. Where these leave multiprocessors idle, each takes a segment:
as many as there are multiprocessors for. The gradient of the state at a segment's end is made
first, of all at once (segment_transition.py, state_passing.py).

A program goes back in parts of `every` chunks, the last one first, so that S is in memory before
the chunks of one part alone; forward leaves S before each part, in 16 bits as it is in all
products. Bytes beyond R, at E bytes an element:

    K V E                       before each part of each head
    K V (E (every - 2) + 4)     of each program that runs: S, and dS while S has its registers
    4 K V                       of each segment: dS at its end, then that while S has its registers;
                                and before the programs run, 4 K (K + V) for M and dE
"""

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import (
    CHUNK,
    NUM_SMS,
    Segments,
    num_fused_bwd,
    num_sequences,
    split_into_segments,
    uses_fused_bwd,
)

# Percent of the bytes of arguments, results and gradients. 25 are promised; a few small tensors are
# not counted.
MAX_WORKSPACE_PCT = 24.9
LITTLE = 1 << 26  # bytes
# Where no parts are that short: of the least, what shorter ones are not worth if that is LITTLE.
SMALL_CALL_BYTES = 0.15
MEMORY_SLACK = 0.125  # by which segments may grow so that they have a whole number of parts
# Microseconds for a chunk there and back, and for a part's beginning and end
# (docs/dev/log/delta.md).
OF_CHUNK, OF_PART = 11.4, 9.0
# Parts that a sequence is tried in.
SEGMENT_COUNTS = 1, 2, 3, *(n << i for i in range(8) for n in (4, 5, 6, 7))


class BackwardSchedule(NamedTuple):
    """
    Attributes:
        every: chunks of a part.
        checkpoints: parts of all sequences, or more.
        segments: None where sequences are whole.
    """

    every: int
    checkpoints: int
    segments: Segments | None = None

    def programs(self, terms: LinearInputs) -> int:
        return terms.v.shape[2] * num_sequences(terms, self.segments)


def make_schedule(terms: LinearInputs, every: int, parts: int = 0) -> BackwardSchedule:
    """parts: of a segment; 0 where sequences are whole."""
    tokens = every * CHUNK
    split = [split_into_segments(terms, x) for x in (tokens, tokens * parts or None)]
    assert split[0] is not None
    return BackwardSchedule(every, split[0].count, split[1])


def choose_schedule(terms: LinearInputs) -> BackwardSchedule | None:
    """So that what there is beyond arguments and results stays below MOST percent of those, in
    as little time as that lets it take; if none are short enough, about as little as can be. None:
    in two kernels, which leave S, dS' and w of all chunks, where heads and all that are few."""
    count = num_fused_bwd(terms)
    B, T, HV, V = terms.v.shape
    K, E = terms.q.shape[3], terms.q.element_size()
    if count == 1 and not uses_fused_bwd(terms):
        return None
    if count > 1 and B * T * HV * V * E * (2 * K + CHUNK) <= LITTLE * CHUNK:
        return None
    # of a packed sequence: on average
    of_one = -(-T // (CHUNK * terms.sequences)) if terms.cu_seqlens is not None else -(-T // CHUNK)
    chunks = -(-of_one // count)
    given = sum(x.numel() * x.element_size() for x in terms if x is not None)
    allowed = (given + B * T * HV * V * E) * 2 * int(10 * MAX_WORKSPACE_PCT) // 1000
    kept = B * T * HV * (CHUNK * E + 8)  # R, beta and G
    sizes: dict[BackwardSchedule, int] = {}
    times: dict[BackwardSchedule, float] = {}
    for parts in SEGMENT_COUNTS:
        every = -(-chunks // parts)
        split = -(-chunks // every) if count > 1 else 0
        if split * every > (1 + MEMORY_SLACK) * chunks:
            continue
        schedule = make_schedule(terms, every, split)
        parked = 0 if split else 4
        run = min(schedule.programs(terms), NUM_SMS) * K * V * (E * max(every - 2, 0) + parked)
        ends = HV * (schedule.segments.count if schedule.segments else 0) * 4 * K
        sizes[schedule] = (
            schedule.checkpoints * HV * K * V * E + ends * V + max(run, ends * (K + V))
        )
        times[schedule] = OF_CHUNK * max(split * every, chunks) + OF_PART * -(-chunks // every)
    least = min(sizes.values())
    if least + kept <= LITTLE:
        least = int((1 + SMALL_CALL_BYTES) * least)
    enough = max(allowed - kept, least)
    return min(
        (schedule for schedule, size in sizes.items() if size <= enough), key=lambda x: times[x]
    )


def empty_checkpoints(terms: LinearInputs, schedule: BackwardSchedule) -> Tensor:
    """S before each part."""
    K, (HV, V) = terms.q.shape[-1], terms.v.shape[2:]
    return terms.v.new_empty(schedule.checkpoints, HV, V, K)

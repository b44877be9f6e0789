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
from slipstream.kernels.linear.sm90.plan import CHUNK, num_segments, uses_fused_bwd
from slipstream.kernels.linear.workspace import LITTLE

# Programs that run at a time: multiprocessors. A few more wait for others' memory; were there many,
# those that have it might wait for the turns of those that have not (bwd_fused.py).
NUM_SMS = 132
# Percent of the bytes of arguments, results and gradients. 25 are promised; a few small tensors are
# not counted.
MAX_WORKSPACE_PCT = 24.9
# Where no parts are that short: of the least, what shorter ones are not worth if that is LITTLE.
SMALL_CALL_BYTES = 0.15
MEMORY_SLACK = 0.125  # by which segments may grow so that they have a whole number of parts
# Microseconds for a chunk there and back, and for a part's beginning and end
# (docs/dev/log/delta.md).
OF_CHUNK, OF_PART = 11.4, 9.0
# Parts that a sequence is tried in.
SEGMENT_COUNTS = 1, 2, 3, *(n << i for i in range(8) for n in (4, 5, 6, 7))


class BackwardSchedule(NamedTuple):
    """every: chunks of a part. marks: parts of all sequences, or more. tokens: of a segment, and
    slots: how many there are, 0 where none is cut."""

    every: int
    marks: int
    tokens: int = 0
    slots: int = 0

    def programs(self, terms: LinearInputs) -> int:
        return terms.v.shape[2] * (self.slots or terms.sequences)


def make_schedule(terms: LinearInputs, every: int, parts: int = 0) -> BackwardSchedule:
    """parts: of a segment; 0 where none is cut."""
    (B, T), N = terms.v.shape[:2], terms.sequences
    packed = terms.cu_seqlens is not None
    tokens, segment = every * CHUNK, every * CHUNK * parts
    marks, slots = (T // x + N if packed else B * -(-T // x) for x in (tokens, segment or 1))
    return BackwardSchedule(every, marks, segment, slots if parts else 0)


def choose_schedule(terms: LinearInputs) -> BackwardSchedule | None:
    """So that what there is beyond arguments and results stays below MOST percent of those, in
    as little time as that lets it take; if none are short enough, about as little as can be. None:
    in two kernels, which leave S, dS' and w of all chunks, where heads and all that are few."""
    count = num_segments(terms)
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
        cut = make_schedule(terms, every, split)
        parked = 0 if split else 4
        run = min(cut.programs(terms), NUM_SMS) * K * V * (E * max(every - 2, 0) + parked)
        ends = HV * cut.slots * 4 * K
        sizes[cut] = cut.marks * HV * K * V * E + ends * V + max(run, ends * (K + V))
        times[cut] = OF_CHUNK * max(split * every, chunks) + OF_PART * -(-chunks // every)
    least = min(sizes.values())
    if least + kept <= LITTLE:
        least = int((1 + SMALL_CALL_BYTES) * least)
    enough = max(allowed - kept, least)
    return min((cut for cut, size in sizes.items() if size <= enough), key=lambda x: times[x])


def empty_checkpoints(terms: LinearInputs, cut: BackwardSchedule) -> Tensor:
    """S before each part."""
    K, (HV, V) = terms.q.shape[-1], terms.v.shape[2:]
    return terms.v.new_empty(cut.marks, HV, V, K)

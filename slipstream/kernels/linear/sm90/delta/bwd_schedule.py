"""The schedule of the delta rule's backward on sm_90 (bwd_fused.py), by shapes alone.

A head of a sequence is one program. Where these leave multiprocessors idle, each takes a segment:
as many as there are multiprocessors for; so it does where one of many packed sequences may be much
longer than the others. The gradient of the state at a segment's end is made first, of all at once
(chunk_dstate.py, segment_launch.py).

A program goes back in checkpoint blocks of `interval` chunks, the last one first, so that S is in
memory before the chunks of one block alone; forward leaves S before each block, in 16 bits as it is
in all products. Bytes beyond R, at E bytes an element:

    K V E                       before each block of each head
    K V (E (interval - 2) + 4)  of each program that runs: S, and dS while S has its registers
    4 K V                       of each segment: dS at its end, then that while S has its registers;
                                and before the programs run, 4 K (K + V) for M and dE
"""

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.launch_cache import by_sizes

# Percent of the bytes of arguments, results and gradients that the kernel may have besides, and
# bytes that it always may.
MAX_WORKSPACE_PCT = 24.9
SMALL_BYTES = 1 << 26


class BackwardSchedule(NamedTuple):
    """
    Attributes:
        interval: chunks of a block.
        checkpoints: blocks of all sequences, or more.
        segments: None where sequences are whole.
    """

    interval: int
    checkpoints: int
    segments: segmentation.Segments | None = None

    def programs(self, terms: LinearInputs) -> int:
        return terms.v.shape[2] * segmentation.num_sequences(terms, self.segments)


def make_schedule(terms: LinearInputs, interval: int, blocks: int = 0) -> BackwardSchedule:
    """blocks: of a segment; 0 where sequences are whole."""
    tokens = interval * segmentation.CHUNK
    split = [segmentation.split_into_segments(terms, x) for x in (tokens, tokens * blocks or None)]
    assert split[0] is not None
    return BackwardSchedule(interval, split[0].count, split[1])


def choose_schedule(terms: LinearInputs) -> BackwardSchedule | None:
    """So that what there is beyond arguments and results stays below MAX_WORKSPACE_PCT of those or
    SMALL_BYTES, in as little time as that lets it take; if none are short enough, as little memory
    as can be. None: in two kernels, which leave S, dS' and w of all chunks, where heads and all
    that are few."""
    count = segmentation.num_fused_bwd(terms)
    B, T, HV, V = terms.v.shape
    K, E = terms.q.shape[3], terms.q.element_size()
    if count == 1 and not segmentation.uses_fused_bwd(terms):
        return None
    if (
        count > 1
        and B * T * HV * V * E * (2 * K + segmentation.CHUNK) <= SMALL_BYTES * segmentation.CHUNK
    ):
        return None
    packed = terms.cu_seqlens is not None
    input_bytes = sum(x.numel() * x.element_size() for x in terms if x is not None)
    allowed = (input_bytes + B * T * HV * V * E) * 2 * int(10 * MAX_WORKSPACE_PCT) // 1000
    saved_bytes = B * T * HV * (segmentation.CHUNK * E + 8)  # R, beta and G
    sizes = B, T, terms.sequences, packed, HV, K, V, E
    # of a packed sequence: on average
    chunks = (
        -(-T // (segmentation.CHUNK * terms.sequences)) if packed else -(-T // segmentation.CHUNK)
    )
    cut = segmentation.packed_bwd_chunks(terms) if count == 1 else -(-chunks // count)
    return make_schedule(
        terms, *_choose_blocks(cut or chunks, cut > 0, allowed, saved_bytes, *sizes)
    )


class Blocks(NamedTuple):
    """interval: chunks of a block. split: blocks of a segment, 0 where sequences are whole."""

    interval: int
    split: int


@by_sizes
def _choose_blocks(
    chunks: int,
    cut: bool,
    allowed: int,
    saved_bytes: int,
    B: int,
    T: int,
    N: int,
    packed: bool,
    HV: int,
    K: int,
    V: int,
    E: int,
) -> Blocks:
    """chunks: of a sequence, or of a segment where they are cut."""
    sizes: dict[Blocks, int] = {}
    times: dict[Blocks, float] = {}

    def num_segments(blocks: int) -> int:
        tokens = blocks * segmentation.CHUNK
        return T // tokens + N if packed else B * -(-T // tokens)

    for blocks in (1, 2, 3, *(n << i for i in range(8) for n in (4, 5, 6, 7))):
        interval = -(-chunks // blocks)
        split = -(-chunks // interval) if cut else 0
        segments = num_segments(interval * split) if split else 0
        programs = min(HV * (segments or N), segmentation.NUM_SMS)
        run = programs * K * V * (E * max(interval - 2, 0) + (0 if split else 4))
        row_bytes = HV * segments * 4 * K
        found = Blocks(interval, split)
        sizes[found] = num_segments(interval) * HV * K * V * E
        sizes[found] += row_bytes * V + max(run, row_bytes * (K + V))
        # microseconds on an H200: of a chunk there and back, and of a block's beginning and end
        times[found] = 11.4 * max(split * interval, chunks) + 9.0 * -(-chunks // interval)
    limit = max(max(allowed, SMALL_BYTES) - saved_bytes, min(sizes.values()))
    return min((x for x, size in sizes.items() if size <= limit), key=lambda x: times[x])


def schedule_of_segments(terms: LinearInputs, tokens: int) -> BackwardSchedule | None:
    """A schedule for segments of a given length, by that and V alone: blocks of equal length, at
    most 64 chunks: more need too much memory. None: in two kernels, which have no such blocks."""
    chunks = tokens // segmentation.CHUNK
    interval = max(n for n in range(1, 64 + 1) if chunks % n == 0)
    # blocks of fewer than 8 chunks take too long
    if terms.v.shape[3] != 2 * segmentation.TILE_V or interval < min(chunks, 8):
        return None
    cut = segmentation.split_into_segments(terms, tokens)
    assert cut is not None
    blocks = make_schedule(terms, interval).checkpoints
    return BackwardSchedule(interval, blocks, cut._replace(fixed=True))


def empty_checkpoints(terms: LinearInputs, schedule: BackwardSchedule) -> Tensor:
    """S before each block."""
    K, (HV, V) = terms.q.shape[-1], terms.v.shape[2:]
    return terms.v.new_empty(schedule.checkpoints, HV, V, K)

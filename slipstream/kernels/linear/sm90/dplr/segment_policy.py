"""In how many segments kda, rwkv7, dplr and iplr walk a sequence on sm_90, by shapes alone.

A walk takes one multiprocessor a head and sequence, which leaves most of them idle where these are
few. In n segments, in chunks of a walk:

    chunks / n       times how often all multiprocessors are filled by E and M of segments, M as
                     wide as K, which take no longer for a chunk than a walk
    JOIN n           from segment to segment, S <- M S + E with M from memory
    chunks / n       the walk
    WORTH            the launches

Backward has the same once more, but for M. The n of the least sum is taken, if that is below the
chunks of the walk itself.
"""

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.plan import CHUNK
from slipstream.kernels.linear.triton.scalar_decay.launch import Segments, split_into_segments
from slipstream.kernels.linear.triton.scalar_decay.tiles import MIN_PROGRAMS_PER_SM

NUM_SMS = MIN_PROGRAMS_PER_SM // 2  # multiprocessors
MIN_SEGMENT_CHUNKS = 8  # chunks of a segment
JOIN, WORTH = 4, 18


def choose_segments(terms: LinearInputs) -> Segments | None:
    T, HV, V = terms.v.shape[1:]
    walks, tiles = HV * terms.sequences, 1 + -(-terms.q.shape[-1] // V)
    # packed sequences have so many on average
    chunks = T // CHUNK // (1 if terms.cu_seqlens is None else terms.sequences)
    n = num_segments(walks, tiles, chunks)
    return split_into_segments(terms, -(-chunks // n) * CHUNK) if n > 1 else None


def num_segments(walks: int, tiles: int, chunks: int) -> int:
    """tiles: programs for E and M of a segment and head."""
    most = min(NUM_SMS // walks, chunks // MIN_SEGMENT_CHUNKS)
    return min(range(1, max(1, most) + 1), key=lambda n: _cost(walks, tiles, chunks, n))


def _cost(walks: int, tiles: int, chunks: int, n: int) -> int:
    if n == 1:
        return chunks
    each, waves = -(-chunks // n), -(-walks * tiles * n // NUM_SMS)
    return each * (waves + 1) + JOIN * n + WORTH

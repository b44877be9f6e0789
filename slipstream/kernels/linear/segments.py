"""How a long sequence of few heads is cut into segments, each computed by programs of its own.

One program a head and sequence leaves most of a GPU idle where these are few. In segments all
programs run at once: each leaves its transition, what it makes of the state (M) and what it adds
to it (E); state passing combines these into the state before each segment; then every segment runs
as if it were a sequence. The choice looks at shapes and dtypes alone, so that equal shapes give
equal bits. With consistent=True forward passes take only segments whose states are rounded as those
of one scan are. Each family of kernels has its own costs, and so its own function here:

    scanned_sm90          sm_90, scalar decay and delta rule, the one that consistent=True has
    scalar_decay_tokens   Triton, no transition: M is one number, or one a channel
    vector_decay_sm90     sm_90, a decay per channel without transition, forward
    delta_tokens          Triton, delta rule and DPLR: M is [K, K]
    delta_sm90            sm_90, delta rule
    dplr_sm90             sm_90, per-channel decay, and free a and b
    uses_fused_fwd        sm_90, KDA's forward in one kernel, and fused_fwd_sm90
    num_fused_bwd         sm_90, the delta rule's backward in one kernel
"""

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.compiler.arch import named
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.consistent import consistent_scope
from slipstream.runtime.launch_cache import by_sizes

NUM_SMS = named("sm_90").units  # of the GPU that these choices were measured on, on every GPU
# Programs of Triton's chunk kernels that fill it: two on each.
TARGET_PROGRAMS = 2 * NUM_SMS
# Chunks from one anchor of the gate's gradient to the next (triton/scalar_decay/chunk.py), a
# multiple of which is a segment backward. An anchor costs as much to write and read as
# 4 / ANCHOR_INTERVAL of the chunk's tensors at K = V = 128.
ANCHOR_INTERVAL = 16
FORWARD_UNIT = 4  # chunks of which one is a multiple forward
MIN_CUT_CHUNKS = 16  # with fewer, the launches of a cut take as long as what it saves
CHUNK = 64  # tokens a chunk of every sm_90 kernel
TMA_COLUMNS = 64  # of a tile of 16 bits: a row is as long as TMA swizzles
TILE_V = 64  # columns of V a program of the delta rule's kernels on sm_90
MIN_SEGMENT_CHUNKS = 8
# What a cut's launches take, in chunks of a program's loop: about 30 us.
LAUNCH_COST = 18
# With fewer, of more heads, a scan without outputs is bound by memory.
MIN_SCANNED_SEGMENTS = 4
# Value heads of all sequences from which on the fused backward takes whole sequences.
FUSED_BWD_MIN_HEADS = 96
# Programs, one a head and sequence, from which on KDA's forward is one kernel. On an H200 96 take
# 71 ns a token, however few there are, and the kernels of chunks 73 for 56 of them.
FUSED_FWD_MIN_PROGRAMS = NUM_SMS * 16 // 33


class Segments(NamedTuple):
    """Sequences cut into `count` segments of `tokens`; the last of a sequence may be shorter.

    fixed: they are a plan's (context_states.py), and nothing may depend on how many there are.
    """

    tokens: int
    count: int
    fixed: bool = False


def split_into_segments(terms: LinearInputs, tokens: int | None) -> Segments | None:
    """Segments of so many tokens, of packed sequences as many as there can be; None for none."""
    if tokens is None:
        return None
    B, T = terms.v.shape[:2]
    packed = terms.cu_seqlens is not None
    return Segments(tokens, T // tokens + terms.sequences if packed else B * -(-T // tokens))


def num_sequences(terms: LinearInputs, segments: Segments | None) -> int:
    """Sequences, or segments if they are cut: what has a program for each head."""
    return terms.sequences if segments is None else segments.count


def num_chunks(terms: LinearInputs, C: int) -> int:
    """Chunks of all sequences, at most (locate_chunk)."""
    B, T = terms.q.shape[:2]
    return B * -(-T // C) if terms.cu_seqlens is None else T // C + terms.sequences


def sequence_args(terms: LinearInputs) -> dict[str, Any]:
    """Arguments by which a kernel finds the tokens of a sequence."""
    packed, (T, HV) = terms.cu_seqlens is not None, terms.v.shape[1:3]
    sizes = {"T": T, "N": terms.sequences, "HV": HV, "PACKED": packed}
    return {"cu_ptr": terms.cu_seqlens, **sizes}


def scan_args(
    terms: LinearInputs, segments: Segments | None, s_in: Tensor | None, s_out: Tensor | None
) -> dict[str, Any]:
    """Arguments of kernels that carry a state from chunk to chunk: its ends, sizes and flags."""
    return {
        "s_in_ptr": s_in,
        "s_out_ptr": s_out,
        "segment": terms.v.shape[1] if segments is None else segments.tokens,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "SPLIT": segments is not None,
        **sequence_args(terms),
    }


def num_anchors(terms: LinearInputs, segments: Segments | None, interval: int) -> int:
    """States, one every `interval` tokens, of all sequences or segments, at most."""
    B, T = terms.v.shape[:2]
    if segments is not None:
        return segments.count * -(-segments.tokens // interval)
    return B * -(-T // interval) if terms.cu_seqlens is None else T // interval + terms.sequences


def delta_grid(terms: LinearInputs, segments: Segments | None, tile: int = TILE_V) -> tuple[int]:
    """The grid of the delta rule on sm_90: a program a tile of V, head and sequence or segment."""
    HV, V = terms.v.shape[2:]
    return (V // tile * HV * num_sequences(terms, segments),)


def scalar_decay_tokens(terms: LinearInputs, programs: int, C: int, unit: int) -> int | None:
    """Tokens of the segments that sequences are cut into, or None for no cut.

    programs: those of one sequence. unit: chunks of which a segment is a multiple, forward
    FORWARD_UNIT and backward ANCHOR_INTERVAL. A cut reads half of the inputs once more: made where
    a sequence, of packed ones one of twice the mean, is at least three segments.
    """
    B, T = terms.v.shape[:2]
    if consistent_scope.on:
        return None
    if terms.cu_seqlens is None:
        return _scalar_decay_tokens(programs * B, T, 2, C, unit)
    return _scalar_decay_tokens(programs, T, max(terms.sequences, 2), C, unit)


@by_sizes
def _scalar_decay_tokens(programs: int, T: int, sequences: int, C: int, unit: int) -> int | None:
    count, chunks = TARGET_PROGRAMS // max(programs, 1), -(-T // C)
    if 2 * count < 3 * sequences or 2 * chunks < sequences * max(2 * unit, MIN_CUT_CHUNKS):
        return None
    return -(-chunks // (count * unit)) * unit * C


def scanned_sm90(terms: LinearInputs, programs: int) -> Segments | None:
    """Those of consistent=True, whose states are of one scan without outputs: as many as find a
    multiprocessor. programs: of a whole sequence or segment, of all heads."""
    count = NUM_SMS // (programs * terms.sequences)
    chunks = _chunks_of_a_sequence(terms)
    if not consistent_scope.on or count < MIN_SCANNED_SEGMENTS or chunks < MIN_CUT_CHUNKS:
        return None
    return split_into_segments(terms, -(-chunks // count) * CHUNK)


def vector_decay_sm90(terms: LinearInputs) -> Segments | None:
    """As many segments as there are multiprocessors for their programs, if that at least triples
    the programs, since the kernel of what segments add takes half the time of a scan. Below 1024
    chunks of all heads Triton's kernels are faster."""
    heads, chunks = terms.v.shape[2] * terms.sequences, _chunks_of_a_sequence(terms)
    tokens = None if consistent_scope.on else _vector_decay_tokens(heads, chunks)
    return split_into_segments(terms, tokens)


@by_sizes
def _vector_decay_tokens(heads: int, chunks: int) -> int | None:
    count = min(NUM_SMS // heads, chunks // MIN_SEGMENT_CHUNKS)
    if count < 3 or heads * chunks < 1024:
        return None
    return -(-chunks // count) * CHUNK


def delta_tokens(programs: int, T: int, C: int) -> int | None:
    """Tokens of the segments that sequences are cut into, or None for no cut.

    programs: those of all sequences. Cut in n, the kernels take 2.7 / n of the time, for the first
    of them has twice the rows; combining the segments takes a chunk's time for each.
    """
    return None if consistent_scope.on else _delta_tokens(programs, T // C, C)


@by_sizes
def _delta_tokens(programs: int, chunks: int, C: int) -> int | None:
    count = min(TARGET_PROGRAMS // max(programs, 1), isqrt(2 * chunks))
    if count < 5 or chunks < 64:
        return None
    return -(-chunks // count) * C


def delta_sm90(terms: LinearInputs) -> Segments | None:
    """As many segments as find a multiprocessor for each of their programs.

    Where states do not decay their transitions take two programs' time at most, for two segments
    one.
    """
    HV, V = terms.v.shape[2:]
    chunks = _chunks_of_a_sequence(terms)
    programs = V // TILE_V * HV * terms.sequences
    tokens = None if consistent_scope.on else _delta_sm90_tokens(programs, chunks)
    return split_into_segments(terms, tokens)


@by_sizes
def _delta_sm90_tokens(programs: int, chunks: int) -> int | None:
    count = min(NUM_SMS // programs, isqrt(2 * chunks), chunks // MIN_SEGMENT_CHUNKS)
    if count < 2 or chunks - chunks // count < LAUNCH_COST:
        return None
    return -(-chunks // count) * CHUNK


def dplr_sm90(terms: LinearInputs) -> Segments | None:
    """The number of segments with about the least cost, in chunks of a program's loop:

    chunks / n       times how often all multiprocessors are filled by E and M of segments, M as
                     wide as K, which take no longer for a chunk than o does
    4 n              from segment to segment, S <- M S + E with M from memory
    chunks / n       o
    LAUNCH_COST      the launches

    Backward has the same once more, except for M.
    """
    HV, V = terms.v.shape[2:]
    tiles = 1 + -(-terms.q.shape[-1] // V)
    chunks = _chunks_of_a_sequence(terms)
    n = 1 if consistent_scope.on else num_dplr_sm90(HV * terms.sequences, tiles, chunks)
    return split_into_segments(terms, -(-chunks // n) * CHUNK) if n > 1 else None


@by_sizes
def num_dplr_sm90(programs: int, tiles: int, chunks: int) -> int:
    """tiles: programs for E and M of a segment and head."""
    max_segments = min(NUM_SMS // programs, chunks // MIN_SEGMENT_CHUNKS)

    def cost(n: int) -> int:
        if n == 1:
            return chunks
        waves = -(-programs * tiles * n // NUM_SMS)
        return -(-chunks // n) * (waves + 1) + 4 * n + LAUNCH_COST

    counts = range(1, max(1, max_segments) + 1)
    best = min(counts, key=cost)
    # where states decay E and M take no time, and the more segments the better (chunk_fwd.py): they
    # may cost 4% more where states do not
    fits = [n for n in counts if programs * tiles * n <= NUM_SMS]
    return max([best, *(n for n in fits if cost(n) <= 1.04 * cost(best))])


def uses_fused_fwd(terms: LinearInputs) -> bool:
    """Whether sm_90 has the forward of whole sequences in one kernel (sm90/dplr/fused_fwd.py): it
    is KDA's of 128 channels in bfloat16, whose range its operands need, with gates of float32.

    How long the longest of packed sequences is the host does not know. It is taken for all tokens,
    or from six sequences on for half of them, of which it would rarely be more.
    """
    q, v, g = terms.q, terms.v, terms.g
    if terms.transition != "delta" or terms.decay != "channel" or terms.erase is not None:
        return False
    if g is None or (q.dtype, g.dtype) != (torch.bfloat16, torch.float32) or consistent_scope.on:
        return False
    alike = terms.sequences if terms.cu_seqlens is None else 1 + (terms.sequences >= 6)
    if not q.shape[-1] == v.shape[-1] == 128:
        return False
    return v.shape[2] * alike >= FUSED_FWD_MIN_PROGRAMS or fused_fwd_sm90(terms) is not None


def fused_fwd_sm90(terms: LinearInputs) -> Segments | None:
    """Its segments where heads are few."""
    (B, T, HV, _), packed = terms.v.shape, terms.cu_seqlens is not None
    tokens = _fused_fwd_tokens(B * HV, T // CHUNK, terms.sequences if packed else 1)
    return split_into_segments(terms, tokens)


@by_sizes
def _fused_fwd_tokens(heads: int, chunks: int, sequences: int) -> int | None:
    """sequences: packed ones. Compared are times at weak gates, where a segment is scanned twice
    and waits for the one before, with those of the kernels of chunks, in us."""
    count = NUM_SMS // max(heads, 1)
    blocks = -(-chunks // max(count, 1))
    # then a program a head and sequence takes 20 us less, at any gates
    whole = (1 + (sequences >= 6)) * heads >= FUSED_FWD_MIN_PROGRAMS
    faster = 10 * blocks + 6 * count <= 60 + heads * chunks // 12
    fits = blocks >= (64 if whole else 8) and count >= 2
    return blocks * CHUNK if fits and faster else None


def uses_fused_bwd(terms: LinearInputs) -> bool:
    """Whether sm_90 has the delta rule's backward of whole sequences in one kernel
    (sm90/delta/bwd_fused.py)."""
    if terms.transition != "delta" or terms.decay == "channel":
        return False
    HV, V = terms.v.shape[2:]
    return V <= 128 and HV * terms.sequences >= FUSED_BWD_MIN_HEADS


def num_fused_bwd(terms: LinearInputs) -> int:
    """How many segments of a sequence, about, that backward takes where heads are fewer
    (sm90/delta/bwd_schedule.py); 1 where it takes none."""
    if terms.transition != "delta" or terms.decay == "channel":
        return 1
    HV, V = terms.v.shape[2:]
    heads = HV * terms.sequences
    if V != 2 * TILE_V or not 0 < heads < FUSED_BWD_MIN_HEADS:
        return 1
    return _num_fused_bwd(heads, _chunks_of_a_sequence(terms))


@by_sizes
def _num_fused_bwd(heads: int, chunks: int) -> int:
    return max(1, min(NUM_SMS // heads, chunks // 2))


def packed_bwd_chunks(terms: LinearInputs) -> int:
    """Chunks of a segment that this backward takes where heads are many but one packed sequence may
    be so long that most multiprocessors wait for it; 0 for whole sequences."""
    HV, V = terms.v.shape[2:]
    if terms.cu_seqlens is None or V != 2 * TILE_V:
        return 0
    return _packed_bwd_chunks(HV, terms.sequences, terms.q.shape[1] // CHUNK)


@by_sizes
def _packed_bwd_chunks(heads: int, sequences: int, chunks: int) -> int:
    of_a_processor = heads * chunks // NUM_SMS
    segment = 8 if of_a_processor < 12 else 16
    # the launches before take a chunk's time and a quarter of a multiprocessor's; a cut has to save
    # a fifth
    cut = of_a_processor + segment + of_a_processor // 4 + 1
    longest = max(of_a_processor, _longest(sequences, chunks))
    return segment if 5 * cut < 4 * longest else 0


def waits_for_longest(terms: LinearInputs, programs: int) -> bool:
    """Whether a scan of few packed sequences, the longest first, lasts as long as that one: it has
    more tokens than a multiprocessor's share of all. programs: of a head and sequence."""
    if terms.cu_seqlens is None or consistent_scope.on:
        return False
    return _waits_for_longest(programs * terms.v.shape[2], terms.sequences)


@by_sizes
def _waits_for_longest(programs: int, sequences: int) -> bool:
    # as _longest says, of as many as are sorted (sm90/common.py); by sequences alone, so
    # that few sizes have all variants (compile_ahead.Size)
    return sequences <= 64 and sequences * (5 * programs) ** 2 < (4 * NUM_SMS) ** 2


def _longest(sequences: int, chunks: int) -> int:
    """Chunks of the longest packed sequence, about: lengths are on the device. Those of documents
    are about log-normal, and of N the longest has about 0.8 sqrt(N) times the mean."""
    return 8 * chunks // isqrt(100 * sequences)


def _chunks_of_a_sequence(terms: LinearInputs) -> int:
    """The chunks of a sequence; for packed sequences their mean."""
    return terms.q.shape[1] // CHUNK // (1 if terms.cu_seqlens is None else terms.sequences)

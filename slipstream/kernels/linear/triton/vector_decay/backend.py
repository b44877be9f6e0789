"""The stages of a decay per channel by Triton kernels (kernels/linear/vector_decay.py has their
order)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import inputs, prefix_states, vector_decay
from slipstream.kernels.linear.plan import INTERPRETED
from slipstream.kernels.linear.segments import ANCHOR_INTERVAL, NUM_SMS, num_sequences
from slipstream.kernels.linear.triton.common.gate_ones import gate_ones
from slipstream.kernels.linear.triton.common.state_passing import decay_state_passing
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile, family_of, power_of_two
from slipstream.kernels.linear.triton.vector_decay import chunk, intra_fwd, tiles
from slipstream.kernels.linear.triton.vector_decay.dqkg import vector_decay_dqkg_kernel
from slipstream.kernels.linear.triton.vector_decay.tiles import scan_stages
from slipstream.kernels.linear.vector_decay import ChunkLaunch, IntraChunk, VectorDecayProblem
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached


class Range(NamedTuple):
    """How far gates may decay in a dtype.

    Attributes:
        bound: what those of a block that subchunk_decay.py calls safe add up to at least, negated:
            its factors, exp of it at most, times k have to fit the dtype, and in float32 its
            rounding counts.
        shift: by how much the exponents of both factors are shifted to lie on both sides of 0, so
            that blocks may decay further: others than bf16 would lose small numbers.
        apart: in base 2, how far both halves of a chunk are from its middle, which may then decay
            further (subchunk_decay.py).
    """

    bound: float
    shift: float
    apart: float


RANGES = {
    torch.bfloat16: Range(60.0, 60.0, 55.0),
    torch.float16: Range(6.0, 0.0, 0.0),
    torch.float32: Range(6.0, 0.0, 0.0),
}

# Chunks a program of the kernels that most chunks do not need.
MAX_PAIRS_SHARE = 32
_ROWS = "r_ptr", "w_ptr", "x_ptr", "rest_ptr", "y_ptr", "other_ptr"


@cache
def _tile(device: torch.device, K: int, bytes_each: int) -> tiles.VectorDecayTile:
    return tiles.choose("interpreter" if INTERPRETED else family_of(device), K, bytes_each)


def _tile_of(problem: VectorDecayProblem) -> tiles.VectorDecayTile:
    k = problem.k
    return _tile(k.device, k.shape[-1], k.element_size())


@cache
def _chunk_tile(device: torch.device, D: int, X: int, bytes_each: int, C: int) -> tuple[Tile, int]:
    return tiles.choose_chunk_tile(
        "interpreter" if INTERPRETED else family_of(device), D, X, bytes_each, C
    )


class TritonVectorDecay(vector_decay.VectorDecayBackend):
    state_passing = staticmethod(decay_state_passing)

    def chunk(self, terms: inputs.LinearInputs) -> int:
        return _tile(terms.k.device, terms.k.shape[-1], terms.k.element_size()).C

    def tiles_of_columns(self, terms: inputs.LinearInputs) -> int:
        D, X = terms.q.shape[-1], terms.v.shape[-1]
        if terms.gv is not None:
            D, X = X, D
        tile, _ = _chunk_tile(terms.k.device, D, X, terms.k.element_size(), self.chunk(terms))
        return -(-X // tile.BX)

    def intra_chunk(
        self,
        problem: VectorDecayProblem,
        memory: Tensor | None = None,
        fine: bool = False,
        p: Tensor | None = None,
    ) -> IntraChunk:
        k, g, terms, C = problem.k, problem.g, problem.terms, problem.C
        HV, K = g.shape[2:]
        free: list[Tensor] = []
        if memory is not None and memory.element_size() >= k.element_size():
            free = [x.view(g.shape) for x in memory.view(-1).view(k.dtype).split(g.numel())]

        def like_g() -> Tensor:
            return free.pop() if free else torch.empty(g.shape, dtype=k.dtype, device=k.device)

        has_q = problem.q is not None
        # With u the kernel would have 344 bytes of registers on the stack; with gates in 16 bits
        # early bits changed on an H100 (docs/dev/tried/vector-decay.md, 26 and 27 November).
        apart = RANGES[k.dtype].apart if terms.u is None and g.dtype == torch.float32 else 0.0
        intra = IntraChunk(
            like_g() if has_q else None,
            like_g(),
            k.new_empty(problem.chunks, HV, C, C) if has_q else None,
            k.new_empty(problem.chunks, HV, K, dtype=torch.float32),
            like_g() if fine else None,
            k.new_empty(problem.chunks, HV, dtype=torch.int32) if has_q and apart else None,
        )
        inputs: dict[str, Any] = {"q_ptr": problem.q, "k_ptr": k, "g_ptr": g}
        inputs |= {"u_ptr": terms.u if has_q else None, "HK": k.shape[2], **_size_args(problem)}
        kernel_tile = _tile_of(problem).prepare
        options: dict[str, Any] = {
            **_options(problem, kernel_tile),
            "K": K,
            "BOUND": RANGES[k.dtype].bound,
        }
        outputs = {f"{name}_ptr": x for name, x in intra._asdict().items()}
        pairs, HX = {"v_ptr": None, "do_ptr": None, "p_ptr": None}, problem.v.shape[2]
        if p is not None:
            pairs = {"v_ptr": problem.v, "do_ptr": problem.do, "p_ptr": p}
        grouped = options["GROUPED"] or (p is not None and HX != HV)
        # ptxas takes 233 by itself, which leave a multiprocessor two programs in place of three
        registers = kernel_tile.registers if has_q and apart and K <= kernel_tile.BK else None
        cached(intra_fwd.vector_decay_intra_fwd_kernel)[HV * problem.chunks,](
            **inputs,
            **outputs,
            **pairs,
            HX=HX,
            APART=apart,
            **{**options, "GROUPED": grouped},
            **_values(problem),
            **({} if registers is None else {"maxnreg": registers}),
        )
        if intra.a is not None:
            total = HV * problem.chunks
            options |= {
                **_bound(problem),
                "SHIFT": RANGES[k.dtype].shift,
                "APART": apart,
                "LEVELS": C.bit_length() - 1,
                "MAX_CHUNKS": MAX_PAIRS_SHARE,
                "num_stages": 1,
            }
            cached(intra_fwd.vector_decay_scores_kernel)[_programs(total),](
                **inputs,
                decay_ptr=intra.decay,
                strong_ptr=intra.strong,
                a_ptr=intra.a,
                ones_ptr=_ones(problem),
                total=total,
                **options,
            )
        return intra

    def chunk_scan(
        self, chunks: ChunkLaunch, problem: VectorDecayProblem, intra: IntraChunk
    ) -> None:
        sums = chunks.sums
        r, w, x, terms, segments = *chunks[:3], problem.terms, problem.segments
        HV = problem.g.shape[2]
        HR, HX, D, X, C = r.shape[2], x.shape[2], r.shape[-1], x.shape[-1], problem.C
        tile, BD = _chunk_tile(x.device, D, X, x.element_size(), C)
        rows: list[Any] = [r, w, x, chunks.rest, chunks.y, chunks.other]
        a, tiles, packed = chunks.a, None, terms.cu_seqlens is not None
        programs = -(-X // tile.BX) * HV
        whole = packed and segments is None
        stages = scan_stages(tile, BD, x.element_size(), programs, whole)
        if tile.tma and not packed:
            ke = tile.BX if chunks.rows else BD
            tiles = tma_descriptors(rows, [BD, BD, tile.BX, ke, tile.BX, tile.BX], C)
            if tiles is not None and a is not None:
                a = _squares(a)
        cached(chunk.vector_decay_chunk_kernel)[programs * num_sequences(terms, segments),](
            **dict(zip(_ROWS, tiles or rows)),
            a_ptr=a,
            decay_ptr=intra.decay,
            s_in_ptr=chunks.s_in,
            s_out_ptr=chunks.s_out,
            total_ptr=chunks.total,
            sums_ptr=sums.sums if sums else None,
            z_ptr=sums.z if sums and chunks.reverse else None,
            anchor_ptr=sums.anchors if sums else None,
            **(chunks.prefix.pointers() if chunks.prefix else prefix_states.NO_POINTERS),
            scale=chunks.scale,
            scale_in=chunks.scale_in,
            scale_out=chunks.scale_out,
            **_size_args(problem),
            HR=HR,
            HX=HX,
            segment=problem.k.shape[1] if segments is None else segments.tokens,
            D=D,
            X=X,
            BD=BD,
            BX=tile.BX,
            C=C,
            ANCHOR_INTERVAL=ANCHOR_INTERVAL,
            REVERSE=chunks.reverse,
            ROWS=chunks.rows,
            TRANSPOSED=chunks.rows != (terms.gv is not None),
            SPLIT=segments is not None,
            PACKED=packed,
            GROUPED=HR != HV or HX != HV,
            TMA=tiles is not None,
            STAGES=stages if tile.tma else None,
            PRECISION=fp32_dot_precision(),
            num_warps=tile.warps,
            num_stages=stages,
        )

    def chunk_pairs(self, problem: VectorDecayProblem) -> Tensor:
        p, HV, HX = problem.empty_pairs(), problem.g.shape[2], problem.v.shape[2]
        absent = (f"{name}_ptr" for name in ("q", "k", "g", "u", *IntraChunk._fields))
        # the same whatever they would be, so that they compile nothing new
        unused = dict.fromkeys(("K", "BK", "BOUND", "APART", "BEFORE", "BF16_TERMS"), 0)
        options = _options(problem, _tile_of(problem).prepare) | unused
        cached(intra_fwd.vector_decay_intra_fwd_kernel)[HV * problem.chunks,](
            **dict.fromkeys(absent),
            v_ptr=problem.v,
            do_ptr=problem.do,
            p_ptr=p,
            **_size_args(problem),
            HK=HV,
            HX=HX,
            **{**options, "GROUPED": HX != HV},
            **_values(problem),
        )
        return p

    def chunk_grads(
        self,
        problem: VectorDecayProblem,
        intra: IntraChunk,
        p: Tensor,
        scale: float,
        **named: Tensor | None,
    ) -> None:
        kernel_tile, K, C = _tile_of(problem).grads, problem.k.shape[-1], problem.C
        total = -(-K // kernel_tile.BK) * problem.g.shape[2] * problem.chunks
        args: dict[str, Any] = {
            "q_ptr": problem.q if "dk" in named else None,
            "k_ptr": problem.k,
            "g_ptr": problem.g,
            "u_ptr": problem.terms.u,
            "p_ptr": p,
            **{f"{x}_ptr": named.get(x) for x in ("dqs", "dke", "z", "dq", "dk", "dg", "du")},
            "decay_ptr": intra.decay,
            "scale": scale,
            **_size_args(problem),
            "HK": problem.k.shape[2],
        }
        apart = RANGES[problem.k.dtype].apart if "dk" in named else 0.0
        options: dict[str, Any] = {
            **_options(problem, kernel_tile),
            **_bound(problem),
            "K": K,
            "MAX_CHUNKS": MAX_PAIRS_SHARE,
            "LEVELS": C.bit_length() - 1,
            "SHIFT": RANGES[problem.k.dtype].shift,
            "APART": apart,
        }
        pieces = problem.k.new_empty(total, dtype=torch.int32) if apart else None

        def launch(PIECES: int, programs: int, **more: Any) -> None:
            cached(vector_decay_dqkg_kernel)[programs,](**args, **more, **options, PIECES=PIECES)

        launch(1, total, pieces_ptr=None, ones_ptr=None, total=None)
        for count in (2, 4) if apart else ():
            launch(count, _programs(total), pieces_ptr=pieces, ones_ptr=None, total=total)
        launch(0, _programs(total), pieces_ptr=pieces, ones_ptr=_ones(problem), total=total)


def _squares(a: Tensor) -> Any:
    """A descriptor of [chunks * HV, C, C] by single squares."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    a = a.view(-1, *a.shape[2:])
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [1, *map(int, a.shape[1:])])


def _size_args(problem: VectorDecayProblem) -> dict[str, Any]:
    """cu_ptr to HV, as every kernel takes them."""
    terms = problem.terms
    T, HV = problem.k.shape[1], problem.g.shape[2]
    return {"cu_ptr": terms.cu_seqlens, "T": T, "N": terms.sequences, "HV": HV}


def _values(problem: VectorDecayProblem) -> dict[str, int]:
    V = problem.v.shape[-1]
    return {"V": V, "BV": _tile(problem.k.device, V, problem.k.element_size()).prepare.BK}


def _ones(problem: VectorDecayProblem) -> Tensor:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return gate_ones(problem.k.device, problem.C, dtype)


def _programs(total: int) -> int:
    """Programs of up to MAX_PAIRS_SHARE chunks each: enough to fill a GPU, if there are."""
    return max(-(-total // MAX_PAIRS_SHARE), min(total, 4 * NUM_SMS))


def _options(problem: VectorDecayProblem, kernel_tile: tiles.KernelTile) -> dict[str, Any]:
    k = problem.k
    bf16_terms = 1 if problem.g.dtype == torch.bfloat16 else 2
    if k.dtype == torch.float32:
        bf16_terms = 3
    return {
        "BK": kernel_tile.BK,
        "C": problem.C,
        "BEFORE": problem.terms.u is not None,
        "PACKED": problem.terms.cu_seqlens is not None,
        "GROUPED": k.shape[2] != problem.g.shape[2],
        "BF16_TERMS": 0 if INTERPRETED else bf16_terms,
        "PRECISION": fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": kernel_tile.stages,
    }


def _bound(problem: VectorDecayProblem) -> dict[str, Any]:
    """By which a chunk is one safe block, or not."""
    return {"ALL": power_of_two(problem.k.shape[-1]), "BOUND": RANGES[problem.k.dtype].bound}


BACKEND = TritonVectorDecay()
forward, backward = BACKEND.forward, BACKEND.backward

"""Every kernel compiled for GPUs that need not be there, as the catalogue's calls launch it. The
calls are traced (compiler/trace.py), so tiles and arguments are those of real launches. What a
kernel's code has to have besides is in the tests of its family."""

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

import slipstream.kernels
from slipstream.compiler import compiler_state
from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.compile_worker import Outcome
from slipstream.compiler.support_matrix import Task, judge
from slipstream.compiler.trace import trace
from slipstream.kernels.conv.inputs import UNIT_WIDTHS, ConvInputs
from slipstream.kernels.conv.op import convolution
from slipstream.tools.backend_query import find_kernels
from slipstream.tools.catalog import REPRESENTATIVE, SAMPLES, Shape
from slipstream.tools.samples import Sample
from tests.support import wants
from tests.support.sass import arrives_early, disassemble, most_spilled, overwritten
from tests.support.scripts import script
from tests.support.triton_release import HAS_GLUON
from tests.support.uniform_registers import unwritten

pytestmark = wants.compiler

LAYER_SAMPLES = script("tools/layer_samples").LAYER_SAMPLES
cover = script("tools/variant_cover").cover
ROOT = Path(slipstream.kernels.__file__).parent
_KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


def _folder_of(path: Path) -> str:
    """That of a file: matmul/sm90 of matmul/sm90_kernels.py, too."""
    is_folder = path.name.endswith("_kernels.py")
    place = path.with_name(path.name.removesuffix("_kernels.py")) if is_folder else path.parent
    return place.relative_to(ROOT).as_posix()


FOLDER_OF = {
    name: _folder_of(path)
    for path in sorted(ROOT.rglob("*.py"))
    if HAS_GLUON or "sm90" not in _folder_of(path)
    for name in _KERNEL.findall(path.read_text())
}
SM90 = sorted({x for x in FOLDER_OF.values() if "sm90" in x})
TRITON = sorted({x for x in FOLDER_OF.values() if "sm90" not in x})
# Folders of kernels with products, whose tiles differ between architectures.
PRODUCTS = [x for x in TRITON if x.startswith(("attention", "linear", "matmul"))]
# Of the shapes of the matrix, those whose calls launch what others do not: the first for every
# operator, then the widest and the longest.
SHAPES = (0, 2, 5)

# Bytes of stack a thread, of others none. Words that are kept from before a loop over chunks till
# after it, where nothing else is said.
STACK = {
    # pointers, mostly outside of the inner loops; 256: dk and dv of the widest heads
    "softmax_dkv_kernel": 768,
    "softmax_queries_kernel": 256,
    # 12.7 ms on an H200, tiles of 64 queries 21.8; 400: dk and dv of the widest heads
    "selected_keys_grad_kernel": 400,
    # 14.3 ms of 128 rows and heads of 256, 17.7 by 64 rows, which spill nothing
    "selected_queries_kernel": 160,
    "selected_entries_grad_kernel": 24,
    # blocks of 64 keys
    "selected_fwd_sm90_kernel": 24,
    # with every option
    "softmax_fwd_sm90_kernel": 16,
    "vector_decay_dqkg_kernel": 1368,
    "softmax_latent_decode_sm90_kernel": 8,
    "attnres_fwd_kernel": 64,
    "attnres_bwd_kernel": 64,
    "scan_kernel": 32,
    "selective_scan_forward_kernel": 32,
    "selective_scan_backward_kernel": 32,
    "selective_scan_forward_sm90_kernel": 32,
    "selective_scan_backward_sm90_kernel": 32,
    "mixer_step_kernel": 96,
    "mixer_drafts_sm90_kernel": 200,
    # sine and cosine of large angles need 28 bytes of it
    "rotation_kernel": 64,
    # whose gradients take more than their part of registers
    "delta_chunk_bwd_sm90_kernel": 24,
    # 4 warps take 14.6 us where 8, which spill nothing, take 18.8
    "delta_state_passing_sm90_kernel": 64,
    # 30.6 us where the order that spills nothing takes 33.8
    "delta_dqkg_sm90_kernel": 16,
    # of a block's preparation, which waits for the scans: these have more registers
    "delta_fused_fwd_sm90_kernel": 64,
    # scores of four kinds wait in registers while the levels are made
    "dplr_intra_safe_sm90_kernel": 120,
    "dplr_wy_sm90_kernel": 48,
    # once a chunk, and with free a and b five sums of 64 x 64, read twice within 16 tokens
    "dplr_intra_safe_bwd_sm90_kernel": 112,
    # in the launch of heads with strong gates, scores of both ways; in the other 296
    "kda_fused_fwd_sm90_kernel": 1784,
    "scalar_decay_chunk_fwd_sm90_kernel": 320,
    "scalar_decay_chunk_bwd_sm90_kernel": 320,
    "vector_decay_chunk_fwd_sm90_kernel": 144,
}
# A view of shared memory: shape and bits of what it is of, and its own.
_TILE = r"!ttg\.memdesc<([\dx]+)x[a-z]+(\d+),"
VIEW = re.compile(rf"memdesc_reinterpret .*{_TILE}.* -> {_TILE}")
# Of another size, which Triton 3.8 refuses: linear/sm90/common.py has another way there.
OTHER_SIZES = {("256", "16", "4x16x16", "16")}
# Words of it that a loop over chunks stores and loads.
SPILLED = {"delta_chunk_bwd_sm90_kernel": 8, "delta_dqkg_sm90_kernel": 1}
SPILLED |= {"delta_fused_fwd_sm90_kernel": 24}
# Kernels of which it is known that no more of it is in loops.
COUNTED = ("attention/sm90", "linear/sm90/delta")
# Products of a few rows, which are less than wgmma takes.
SLOW = dict.fromkeys(("mixer_drafts_sm90_kernel", "mhc_scores_kernel"), "mma.sync instead of wgmma")
# Kernels in Triton that scan chunks want more registers than there are.
MOST_OF_SCANS = 1280
# mma.sync of a warp in linear/sm90/common.py: nine products of blocks, each 8 columns at a time,
# and three times for the halves of its operands.
INVERSE = 9 * 2 * 3
MMA_SYNC = {"delta_solve_tril_sm90_kernel": INVERSE, "dplr_wy_sm90_kernel": INVERSE}
MMA_SYNC |= {"dplr_intra_safe_sm90_kernel": INVERSE}
# two products of blocks, 8 columns at a time, in each of two parts, if R is not there
MMA_SYNC |= {"delta_fused_fwd_sm90_kernel": 2 * 2 * 2}
# Who takes a unit of work, by a counter, and programs that hand a state on.
ATOMIC = {"softmax_fwd_sm90_kernel", "delta_chunk_bwd_sm90_kernel", "scan_kernel"}
ATOMIC |= {"mixer_step_kernel"}
IN_LOOPS = {"softmax_fwd_sm90_kernel", "softmax_bwd_sm90_kernel", "softmax_dkv_sm90_kernel"}
IN_LOOPS |= {"softmax_dq_sm90_kernel"}
# No part of these programs waits at the barrier of all of them while it works: threads that meet.
MEETS = {
    "delta_chunk_fwd_sm90_kernel": {"128"},
    "delta_fused_fwd_sm90_kernel": {"128"},
    "delta_chunk_dstate_sm90_kernel": {"128"},
    "delta_segment_transition_sm90_kernel": {"128"},
    "delta_chunk_bwd_sm90_kernel": {"128", "256"},
    "scalar_decay_chunk_fwd_sm90_kernel": {"128", "256"},
    "scalar_decay_chunk_bwd_sm90_kernel": {"128", "256"},
    "kda_fused_fwd_sm90_kernel": {"128"},
    "vector_decay_chunk_fwd_sm90_kernel": {"128"},
}

# Bytes of shared memory that let as many programs share a multiprocessor as a launch counts on.
SHARED = {
    "low_rank_step_kernel": 100 << 10,
    "mixer_drafts_sm90_kernel": 20 << 10,
    "selective_scan_forward_sm90_kernel": ARCHS["sm_90"].shared // 6,
    "selective_scan_backward_sm90_kernel": ARCHS["sm_90"].shared // 6,
}
# How often the code of kernels for sm_90, by Triton 3.6, says what waits for what: a wait that goes
# changes no result here, or waits for what another does where threads run one by one.
ORDERS = json.loads(Path(__file__).with_name("orders.json").read_text())
_ORDER = re.compile(
    r"(?<![.\w])(?:bar(?:rier)?|mbarrier|fence|griddepcontrol|cp\.async\.bulk\.(?:wait|commit)_group"
    r"|wgmma\.(?:wait|commit)_group|st\.release|ld\.acquire)\.[.\w]+"
)
# What a kernel's code has to have: a scan over a run's tokens is a thread's, wide loads, copies to
# shared memory of what comes next.
CODE = {
    "scan_kernel": ("ttgir", r"<\{sizePerThread = \[1, 1, \d\], threadsPerWarp = \[\d+, 1, "),
    "selective_scan_forward_kernel": ("ttgir", r"= \[1, 4\], threadsPerWarp = \[8, 4\]"),
    "selective_scan_backward_kernel": ("ttgir", r"= \[1, 2\], threadsPerWarp = \[8, 4\]"),
    "decay_gate_kernel": ("ptx", r"ld\.global\.v4"),
    "attnres_fwd_kernel": ("ptx", r"cp\.async\.c[ag]\b"),
    "attnres_bwd_kernel": ("ptx", r"cp\.async\.c[ag]\b"),
    "delta_chunk_bwd_sm90_kernel": ("ptx", r"st\.release\.gpu"),
    "matmul_sum_kernel": ("ptx", r"griddepcontrol\.wait"),
}


@cache
def traced(arch: str, i: int) -> list[Task]:
    """The kernels of a shape of the matrix; of those after the first, of the operators that launch
    neighbours of kernels with products."""
    samples: list[Sample] = [*SAMPLES, *LAYER_SAMPLES]
    if i:
        near = {"attention/sm90", "attention/triton", "matmul/sm90"}
        near |= {x for x in SM90 + TRITON if x.startswith("linear")}
        wanted = {op for job, ops in traced("sm_90", 0) for op in ops if folder(job) in near}
        samples = [x for x in samples if x.op in wanted]
    found = find_kernels(samples, REPRESENTATIVE[i : i + 1], arch)
    assert not found.failures
    return found.tasks


def folder(job: Job) -> str:
    return FOLDER_OF.get(job.name, "")


def jobs(place: str) -> list[Job]:
    """Of each kernel in a folder the variant with most arguments and flags, of the first shape that
    launches it, whose tiles are those of most calls."""
    chosen: dict[str, Job] = {}
    # decoding that sm_90 does by a kernel of its own
    for arch, i in [*(("sm_90", i) for i in SHAPES), ("sm_80", SHAPES[0])]:
        here = [job for job, _ in traced(arch, i) if folder(job) == place]
        chosen = {job.name: job for job in sorted(here, key=_fullness)} | chosen
    return list(chosen.values())


def further_jobs(place: str) -> list[Job]:
    """Of each kernel the first of the fewest variants of all shapes that have every flag."""
    found = {job.key: (job, ()) for i in SHAPES for job, _ in traced("sm_90", i)}
    most = 2 if place in SM90 else 1 if place in PRODUCTS else 4
    chosen: dict[str, list[Job]] = {}
    for job, _ in cover([x for x in found.values() if folder(x[0]) == place], "flags"):
        chosen.setdefault(job.name, []).append(job)
    return [job for variants in chosen.values() for job in variants[:most]]


def _fullness(job: Job) -> tuple[int, int, str]:
    return len(job.tensors), sum(map(bool, job.constants.values())), job.key


def check(job: Job, full: bool = False) -> None:
    """full: of the variant that `jobs` has."""
    got = job.compile()
    status, reason = judge(job, Outcome("ok", compiled=got))
    assert status != "refused", f"{job.name}: {reason}"
    assert "spills" in reason or reason == SLOW.get(job.name, ""), f"{job.name}: {reason}"
    scan = job.kernel.partition(".triton.")[0].endswith("kernels.linear") and got.dots
    most = STACK.get(job.name, MOST_OF_SCANS if scan else 0)
    assert got.stack <= most, f"{job.name}: {got.stack} bytes spilled"
    assert not got.instructions["atomic"] or job.name in ATOMIC, job.name
    assert got.shared <= SHARED.get(job.name, got.shared), f"{job.name}: {got.shared} bytes shared"
    kind, pattern = CODE.get(job.name, ("ttgir", ""))
    wide = job.constants.get("UNIT", 16) == 16  # numbers that all counts are a multiple of
    assert not wide or re.search(pattern, got.asm[kind]), job.name
    assert not job.constants.get("PDL") or "griddepcontrol.wait" in got.ptx, job.name
    if job.name in ORDERS and full:
        orders = Counter(_ORDER.findall(got.ptx))
        assert orders == ORDERS[job.name], f"{job.name}: orders.json has another number"
    for view in set(VIEW.findall(got.asm.get("ttgir", ""))) - OTHER_SIZES:
        before, after = (
            int(bits) * math.prod(map(int, shape.split("x")))
            for shape, bits in (view[:2], view[2:])
        )
        assert after == before, f"{job.name}: a view of another size than its tile: {view}"
    if job.arch == "sm_90" and got.instructions["wgmma"]:
        check_products(job, got)


def check_products(job: Job, got: Compiled) -> None:
    """Of programs whose products run beside their threads."""
    text = disassemble(got.asm["cubin"])
    assert not unwritten(text), job.name
    if ".sm90." not in job.kernel:
        return
    assert not overwritten(text), job.name
    assert not arrives_early(got.ptx), job.name
    made = job.name != "delta_fused_fwd_sm90_kernel" or "r_desc" not in job.tensors
    assert got.instructions["mma.sync"] == made * MMA_SYNC.get(job.name, 0), job.name
    copies = any(x.startswith("tensordesc") for x in job.tensors.values())
    assert got.instructions["tma"] or not copies, job.name
    words = most_spilled(text) if got.stack and folder(job) in COUNTED else 0
    assert words <= SPILLED.get(job.name, 0), f"{job.name}: {words} words spilled in a loop"
    if job.name in MEETS:
        meets = {threads for _, threads in re.findall(r"bar\.sync\s+(\d+), (\d+);", got.ptx)}
        assert meets <= MEETS[job.name], job.name
    if job.name in ("delta_chunk_bwd_sm90_kernel", *IN_LOOPS):
        # where the assembler serialises products there is a wait for each
        assert text.count("WARPGROUP.DEPBAR") * 3 <= text.count("HGMMA"), job.name


def test_matrix_reaches_every_kernel_and_family() -> None:
    """A kernel that no call reaches would be trusted with its family and never have been compiled;
    a family without kernels would never be verified."""
    tasks = [task for i in SHAPES for task in traced("sm_90", i)] + traced("sm_80", SHAPES[0])
    assert set(FOLDER_OF) - {job.name for job, _ in tasks} == set()
    families = {compiler_state.family_of(job.kernel.partition(":")[0]) for job, _ in tasks}
    assert families == set(compiler_state.families())


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", [*SM90, *TRITON])
def test_kernels_compile(place: str, thorough: bool) -> None:
    found = jobs(place)
    assert {job.name for job in found} == {x for x, at in FOLDER_OF.items() if at == place}
    for job in further_jobs(place) if thorough else found:
        check(job, full=not thorough)


# Widths that are no multiple of a tile, and rows as long as those of models, of kernels whose tiles
# depend on them.
ROWS = ["rms_norm", "layer_norm", "rms_norm_gated", "cross_entropy", "linear_kl_div"]
EXTREMES = {
    "odd": (["chunk_hgrn", "selective_scan"], Shape(D=700, packed=True, state=True)),
    "long": ([*ROWS, "linear_log_probs"], Shape(D=16384, Z=151_936)),
    "cached": (["rms_norm", "cross_entropy", "linear_kl_div"], Shape(D=2048, Z=32000)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_kernels_compile_for_extremes(name: str) -> None:
    ops, shape = EXTREMES[name]
    found = find_kernels([x for x in SAMPLES if x.op in ops], [shape], "sm_90", impls=(None,))
    assert not found.failures and {op for _, ops in found.tasks for op in ops} == set(ops)
    for job, _ in cover(found.tasks, "few"):
        check(job)


def test_products_of_float32_have_its_digits() -> None:
    """The interpreter multiplies in float32, whatever a product is said to round to."""
    ops = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda", "chunk_rwkv7")
    samples = [x for x in SAMPLES if x.op in (*ops, "attention", "matmul")]
    found = find_kernels(samples, [Shape(K=64, V=64, dtype=torch.float32)], "sm_90")
    names = {name for job, _ in found.tasks for name in job.constants}
    roundings = names & {"PRECISION", "INNER"}
    assert len(roundings) == 2 and not found.failures
    for job, _ in found.tasks:
        assert not {"tf32", "halves"} & {job.constants.get(name) for name in roundings}, job.name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", UNIT_WIDTHS)
def test_normalised_heads_stay_within_a_warp(unit: int, packed: bool) -> None:
    def call(device: torch.device) -> None:
        make = {"device": device, "dtype": torch.bfloat16}
        x, weight = torch.empty(1, 200, 1024, **make), torch.empty(1024, 4, **make)
        cu = torch.empty(3, device=device, dtype=torch.int64) if packed else None
        state = torch.empty(2, 1024, 4, **make) if packed else None
        inputs = ConvInputs(x, weight, None, None, state, cu)
        convolution(inputs, True, "triton", (unit, unit, 1024 - 2 * unit), unit)

    normed = [job for job in trace(call, "sm_90") if job.constants.get("UNIT")]
    assert {job.name for job in normed} == {"conv_fwd_kernel", "conv_bwd_kernel"}
    for job in normed:
        got = job.compile()
        assert got.stack == 0 and (packed or got.shared == 0)

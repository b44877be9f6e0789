"""Calls of any size ask for kernel variants of a list alone, forward and backward: that of a call
of any other size, whose operators say what they compile behind it (runtime/compile_ahead.py).
Random sizes are held against it: up to 64 rows, 160,000 tokens, 300 packed sequences and 160,000
keys of a cache."""

import zlib
from collections.abc import Sequence
from random import Random

import pytest

from slipstream.compiler.trace import trace
from slipstream.runtime.compile_ahead import Size
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from tests.support import wants
from tests.support.scripts import script
from tests.support.size_variants import CHUNKED, PACKED, WAYS, variants, with_size

pytestmark = wants.compiler
LAYER_SAMPLES = script("tools/layer_samples").LAYER_SAMPLES
SIZES = 5
CACHES = {"k_cache", "latent", "key_lengths"}
# Their T is that of a block, the same in every call.
OF_BLOCKS = {"place_tokens"}
# Of several devices, whose calls have no list.
ACROSS_RANKS = {"delta_rule_across_ranks"}
# In `make test`: one for each way to say what other sizes are.
QUICK = {
    *("chunk_gla-narrow", "chunk_gated_delta_product", "fused_recurrent_mamba3", "attention"),
    *("flash_attn_with_kvcache", "latent_attention", "rms_norm", "mixer_step", "projection_step"),
    *("index-blocks", "mhc_pre", "matmul", "prefixes_of_chunk_gated_delta_rule", "selective_scan"),
}


def ways_of(sample: Sample) -> list[str]:
    packs = "cu_seqlens" in sample.takes and any("T" in x for x in sample.dims.values())
    packs = packs and "key_lengths" not in sample.dims  # one for each row
    return ["batch", *["packed"] * packs, *["state"] * bool(sample.states)]


def is_quick(case: tuple[Sample, str]) -> bool:
    sample, way = case
    ways = ways_of(sample)
    return sample.name in QUICK and way == ways[zlib.crc32(sample.name.encode()) % len(ways)]


CASES = [
    (sample, way)
    for sample in (*SAMPLES, *LAYER_SAMPLES)
    if sample.op not in OF_BLOCKS | ACROSS_RANKS
    for way in ways_of(sample)
]


def random_size(random: Random, shape: Shape, sample: Sample) -> Size:
    tokens = round(2 ** random.uniform(0, 15.3))
    if shape.packed:
        sequences = round(2 ** random.uniform(0, 8.3))
        return Size(1, max(tokens, sequences), sequences)
    rows, keys = (round(2 ** random.uniform(0, most)) for most in (6, 17.3))
    if not CACHES.isdisjoint(sample.dims) and random.random() < 0.7:
        return Size(rows, min(round(2 ** random.uniform(0, 12)), keys), keys=keys)
    return Size(rows, min(tokens, 160000 // rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
@pytest.mark.sample(which=is_quick)
def test_random_sizes_ask_for_listed_variants(case: tuple[Sample, str]) -> None:
    sample, way = case
    random = Random(zlib.crc32(f"{sample.name} {way}".encode()))
    heads = random.choice((2, 4, 8, 16, 32))
    shape = Shape(H=heads, state=way == "state", packed=way == "packed")
    first, *others = (random_size(random, shape, sample) for _ in range(SIZES))
    listed = variants(sample, with_size(shape, first), any_size=True)
    assert listed or not sample.tensors
    for size in others:
        found = variants(sample, with_size(shape, size))
        new = {job.name: job.constants for key, job in found.items() if key not in listed}
        assert not new, f"{sample.name} {way}, {heads} heads, {size}: not after {first}: {new}"


# Rows of short axes of a grid (tests/kernels/test_grid_rows.py), and sequences of the scan.
MANY = {
    "selective_scan": [("sm_80", False), ("sm_80", True), ("sm_90", False)],
    **{
        name: [("sm_90", False)]
        for name in ("short_convolution_update", "block_inputs", "low_rank_step")
    },
}


@pytest.mark.parametrize("name", MANY)
def test_rows_beyond_a_grid_axis_ask_for_listed_variants(name: str) -> None:
    sample, rows = next(x for x in (*SAMPLES, *LAYER_SAMPLES) if x.name == name), 70_000
    for arch, packs in MANY[name]:
        shape = Shape(H=4, packed=packs)
        first, size = (Size(1, 3 * n, n) if packs else Size(n, 1) for n in (4, rows))
        listed = variants(sample, with_size(shape, first), any_size=True, arch=arch)
        found = variants(sample, with_size(shape, size), arch=arch)
        assert found and found.keys() <= listed.keys(), f"{arch}, packed: {packs}"


@pytest.mark.parametrize("name", ["attention", "flash_attn_with_kvcache", "latent_attention"])
def test_cached_tokens_ask_for_variants_of_prompts(name: str) -> None:
    """Many tokens fill a GPU alone: then programs share no keys."""
    sample, shape = next(x for x in SAMPLES if x.name == name), Shape(B=4, T=2048, H=8)
    listed = variants(sample, shape, any_size=True)
    for keys in (1, 2000, 9000, 70000):
        found = variants(sample, with_size(shape, Size(1, 1, keys=keys)))
        assert found.keys() <= listed.keys(), f"{keys} keys"


# one of each transition
EACH = {"chunk_simple_gla", "chunk_gla", "chunk_gsa", "chunk_gated_delta_rule", "chunk_rwkv7"}


def kernels(sample: Sample, size: tuple[int, int, int], packed: bool) -> dict[str, str]:
    B, T, H = size
    shape = Shape(B=B, T=T, H=H, packed=packed)
    jobs = trace(
        lambda device: sample.call(sample.inputs(shape, device, blank=True)), "sm_90", True
    )
    return {job.key: job.name for job in jobs}


def assert_same(sample: Sample, sizes: Sequence[tuple[int, int, int]], packed: bool) -> None:
    first = kernels(sample, sizes[0], packed)
    for size in sizes[1:]:
        new = {name for key, name in kernels(sample, size, packed).items() if key not in first}
        assert not new, f"{sample.op}: {size} after {sizes[0]} compiles {new}"


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(which=lambda sample, way: way == "few programs" or sample.op in EACH)
def test_other_sizes_compile_nothing_new(sample: Sample, way: str) -> None:
    assert_same(sample, WAYS[way], False)


@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
@pytest.mark.parametrize("way", PACKED)
@pytest.mark.sample(which=lambda sample, way: sample.op in EACH)
def test_other_packed_lengths_compile_nothing_new(sample: Sample, way: str) -> None:
    assert_same(sample, PACKED[way], True)

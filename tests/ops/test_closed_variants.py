"""Calls of any size ask for kernel variants of a list alone, forward and backward.

slipstream/runtime/size_ladder.py has the sizes that the list is of. Random ones are held against
it: up to 64 rows, 160,000 tokens and 300 packed sequences.
"""

import zlib
from random import Random

import pytest

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.runtime.size_ladder import Size
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from slipstream.tools.size_variants import ladder, variants, with_size

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
WAYS = ("batch", "packed", "state")
SIZES = 5
# The other operators' token by token forms differ from those in chunks up to 16 tokens alone.
BY_TOKEN = {"fused_recurrent_simple_gla", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"}


def ways_of(sample: Sample) -> list[str]:
    packs = "cu_seqlens" in sample.takes and any("T" in x for x in sample.dims.values())
    return ["batch", *["packed"] * packs, *["state"] * bool(sample.states)]


def is_quick(case: tuple[Sample, str]) -> bool:
    """Of each operator one row, in one way."""
    sample, way = case
    ways = ways_of(sample)
    by_token = sample.op.startswith("fused_recurrent_") and sample.op not in BY_TOKEN
    first = next(x for x in SAMPLES if x.op == sample.op) is sample
    return first and not by_token and way == ways[zlib.crc32(sample.name.encode()) % len(ways)]


CASES = [(sample, way) for sample in SAMPLES for way in ways_of(sample)]


def random_size(random: Random, packed: bool) -> Size:
    tokens = round(2 ** random.uniform(0, 15.3))
    if packed:
        sequences = round(2 ** random.uniform(0, 8.3))
        return Size(1, max(tokens, sequences), sequences)
    rows = round(2 ** random.uniform(0, 6))
    return Size(rows, min(tokens, 160000 // rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
@pytest.mark.sample(which=is_quick)
def test_random_sizes_ask_for_listed_variants(case: tuple[Sample, str]) -> None:
    sample, way = case
    random = Random(zlib.crc32(f"{sample.name} {way}".encode()))
    heads = random.choice((2, 4, 8, 16, 32))
    shape = Shape(H=heads, state=way == "state", packed=way == "packed")
    listed = variants(sample, ladder(shape), "sm_90")
    assert listed or not sample.tensors
    for _ in range(SIZES):
        size = random_size(random, shape.packed)
        found = variants(sample, [with_size(shape, size)], "sm_90")
        new = {job.name: job.constants for key, job in found.items() if key not in listed}
        assert not new, f"{sample.name} {way}, {heads} heads, {size}: not in the list: {new}"

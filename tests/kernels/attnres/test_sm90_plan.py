"""How many programs of the backward for sm_90 a multiprocessor gets."""

import pytest

from slipstream.kernels.attnres.sm90 import plan

REGISTERS = 65536


def registers_of(channels: int) -> int:
    """Of a thread with that many channels: the most that a compiler gives."""
    return 64 if channels <= 8 else 128 if channels <= 20 else 255


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("L", [1, 6, 16])
@pytest.mark.parametrize("D", [8, 1024, 2048, 4096, 5120, 6144, 7168, 8192])
def test_programs_are_as_many_as_have_room(L: int, D: int, normed: bool) -> None:
    tile = plan.tile(L, D, normed)
    registers = registers_of(tile.a_thread) * 32 * tile.WARPS
    shared = plan.shared_bytes(L, tile, normed) + plan.RESERVED
    count = plan.programs(L, tile, normed)
    assert count == max(min(REGISTERS // registers, plan.SHARED // shared), 1)

"""The tile of cross-entropy's kernel by the number of classes."""

import pytest

from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


def test_rows_that_stay_in_the_cache_have_more_warps() -> None:
    from slipstream.kernels.loss.triton import cross_entropy as launch

    tiles = {V: launch._tile(V, 2) for V in (100, 4000, 8191, 8192, 32000, 40960, 40961, 151936)}
    few, many = {8191, 40961, 151936}, {8192, 32000, 40960}
    assert {V for V, tile in tiles.items() if tile == (4096, 4)} - {4000} == few
    assert {V for V, tile in tiles.items() if tile == launch.CACHED_TILE} == many
    assert launch._tile(32000, 4) == (4096, 4)

"""Offsets that fit no tokens index nothing outside of them.

On a GPU they are known only later, and an index outside would end the process; an index on a CPU is
checked by torch.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.common import varlen
from slipstream.kernels.conv import eager as conv
from slipstream.layers import attention
from slipstream.layers.call import MixerCall
from slipstream.ops import rotary

T = 5
RIGHT = [[0, 5], [0, 2, 2, 5], [0, 0, 5, 5]]
WRONG = [[2, 5], [0, 4], [0, 6], [0, 4, 3, 5], [7, 9], [-3, 5], [0, 9, 5], [0, 0, 0], [5, 0]]


class OnDevice(Tensor):
    """Offsets whose values are not looked at."""

    is_cpu = False  # type: ignore[assignment]


def on_device(offsets: list[int]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32).as_subclass(OnDevice)


def chunks(cu: Tensor) -> None:
    m, x = varlen.chunk_map(cu, T, 2), torch.arange(T)
    assert len(x[m.token].flatten()[m.slot]) == T


def windows(cu: Tensor) -> None:
    where = conv.positions(cu, T, 4)
    assert len(torch.arange(T)[where.source][where.token]) == T
    assert torch.arange(len(where.source))[where.past].shape == where.past.shape


def grown_cache(cu: Tensor) -> None:
    x = torch.randn(1, T, 2, 3)
    made = attention.extended({"k": x}, MixerCall(cu, use_cache=True))
    assert made["k"].shape[0] == len(cu) - 1


def positions(cu: Tensor) -> None:
    with mock.patch.object(rotary.token_ids, "expect_offsets"):
        assert rotary.packed_positions(cu, T).shape == (1, T)


@pytest.mark.parametrize("offsets", WRONG, ids=str)
@pytest.mark.parametrize("use", [chunks, windows, grown_cache, positions])
def test_wrong_offsets_index_no_other_memory(use: Callable, offsets: list[int]) -> None:
    use(on_device(offsets))


@pytest.mark.parametrize("offsets", [*RIGHT, *WRONG], ids=str)
def test_bounded_offsets_fit_the_tokens(offsets: list[int]) -> None:
    found = varlen.bounded_offsets(on_device(offsets), T).tolist()
    assert found == sorted(found) and (found[0], found[-1]) == (0, T)
    assert offsets not in RIGHT or found == offsets

"""bench/linear_peers.py: what is timed beside peers is what our operators take."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
peers: Any = importlib.import_module("linear_peers")
del sys.path[0]


@pytest.fixture(autouse=True)
def _small_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rand", "randn"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *shape, make=make, device=None, **more: make(*shape, **more)
        )
    for name, size in (("WIDTH", 16), ("SLOTS", 16), ("PART", 40)):
        monkeypatch.setattr(peers, name, size)


@pytest.mark.parametrize("row", peers.ROWS, ids=lambda x: f"{x.op} {x.label}")
def test_rows_fit_their_operators(row: Any) -> None:
    given = peers.inputs(row, True, heads=2)
    taken = inspect.signature(peers.ours_of(row)).parameters
    assert set(given) | set(row.options) <= set(taken)
    o, _ = peers.ours_of(row)(**given, **row.options)
    assert o.shape == row.shape(row.out, peers.PART, 2)


def test_every_operator_has_a_row() -> None:
    chunked = {x.removeprefix("chunk_") for x in dir(ops) if x.startswith("chunk_")}
    assert chunked == {row.op for row in peers.ROWS}


def test_errors_are_told_of_who_has_no_backward() -> None:
    row = next(x for x in peers.ROWS if x.op == "iplr_delta_rule")

    class Peer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple:
            return peers.ours_of(row)(*args, output_final_state=True)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError

    def peer(output_final_state: bool, **named: Any) -> Any:
        return Peer.apply(*named.values())

    errors = peers.against_float64(row, peer)
    assert set(errors) == {"o", "state"} and peers.judged(errors)["out error"].startswith("o")
    assert set(peers.against_float64(row)) == {"o", "state", *row.names.split()}

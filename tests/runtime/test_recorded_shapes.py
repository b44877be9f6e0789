"""Sizes of what torch makes are known to a record before it has made it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.runtime.recorded_shapes import Value
from slipstream.runtime.recording import Unrecordable
from slipstream.runtime.symbolic_sizes import Size
from tests.support import wants
from tests.support.recorded import Toy, launch, record_on_cpu

pytestmark = wants.triton
W = torch.randn(6, 4)
# operations on x [T, 4] whose results are contiguous, in all sizes
CONTIGUOUS: dict[str, Callable[[Tensor], Tensor]] = {
    "order kept": lambda x: x.view(-1, 2, 2).movedim(-2, 1).flatten(1) * 2,
    "repeated columns": lambda x: x.repeat_interleave(2, dim=1),
    "copied in rows": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "times a row": lambda x: x * x[:1],
    "product with a matrix": lambda x: torch.matmul(x, W.t()),
    "sum of products": lambda x: torch.addcmul(x, x, W[:1]),
    "viewed as another": lambda x: (x + 1).view_as(torch.empty_like(x)),
    "one of a batch": lambda x: (x + 1).view(-1, 2, 2)[1].flatten(),
}
# operations on x [T, 4], and how many tensors they make
OPERATIONS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "linear": (lambda x: F.linear(x[None], W), 1),
    "linear with a bias": (lambda x: F.linear(x, W, W[:, 0]), 1),
    "split": (lambda x: x.split([1, 3], -1), 2),
    "split of all sizes": (lambda x: x.split([2, x.shape[0] - 2]), 2),
    "split evenly": (lambda x: x.split(3, dim=1), 2),
    "split with sizes": (lambda x: x.split_with_sizes([3, 1], 1), 2),
    "chunk": (lambda x: x.chunk(2), 2),
    "chunk of columns": (lambda x: x.chunk(2, dim=-1), 2),
    "chunk by names": (lambda x: x.chunk(dim=1, chunks=2), 2),
    "unbind": (lambda x: x.unbind(-1), 4),
    "last columns": (lambda x: x[..., -(x.shape[1] // 2) :] + 0, 1),
    "first columns": (lambda x: x[:, : x.shape[1] // 2] + 0, 1),
    "cat": (lambda x: torch.cat([x, x[:2]]), 1),
    "cat of columns": (lambda x: torch.cat([x, x * 2], dim=1), 1),
    "outer product": (lambda x: x[:, None] * x[:, :, None], 1),
    "a row": (lambda x: x * torch.arange(x.shape[1], device=x.device), 1),
    "a row of as many": (lambda x: x + torch.arange(4, device=x.device), 1),
    "a column": (lambda x: x[:, :1] + x, 1),
    "sum of rows": (lambda x: x.sum(0), 1),
    "largest of columns": (lambda x: x.amax(dim=(-1,)), 1),
    "sum that keeps its axis": (lambda x: x.sum(1, True), 1),
    "sum that keeps its axis by name": (lambda x: x.sum(1, keepdim=True), 1),
    "sum of all": (lambda x: x.sum(), 1),
    "flat": (lambda x: x.flatten() * 2, 1),
    "flat from an axis on": (lambda x: x.view(-1, 2, 2).flatten(1) * 2, 1),
    "flat up to an axis": (lambda x: x.view(-1, 2, 2).flatten(0, 1) * 2, 1),
    "other order": (lambda x: x.view(-1, 2, 2).movedim(-1, 1) * 2, 1),
    "permuted": (lambda x: x.view(-1, 2, 2).permute(2, 0, 1) + 0, 1),
    "expanded from a number": (lambda x: x.new_zeros(()).expand(x.shape[0], 3) + 2, 1),
    "flat across rows": (lambda x: x.view(-1, 2, 2).transpose(1, 2).flatten(1), 1),
    **{name: (call, 1) for name, call in CONTIGUOUS.items()},
    "powers": (lambda x: 2.0 ** -torch.arange(0, 8, 2, device=x.device), 1),
}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_known_early(name: str) -> None:
    """And those of other sizes are torch's."""
    make, count = OPERATIONS[name]

    def body(x: Tensor) -> list[Tensor]:
        made = make(x)
        made = [made] if isinstance(made, Tensor) else list(made)
        sizes = [n for y in made for n in (*y.shape, *(y.stride() if name in CONTIGUOUS else ()))]
        late.append([n for n in sizes if isinstance(n, Size) and n.late])
        # a launch on memory whose size is that of what torch has made
        out = [y.new_empty(y.numel()) for y in made]
        for y, z in zip(made, out, strict=True):
            launch(y.contiguous().view(-1), z)
        return [*out, *made]

    late: list[list[Size]] = []
    toy = Toy(body)
    for n in (7, 7, 7, 7, 5, 12, 8):
        x = torch.randn(n, 4)
        want = make(x)
        want = [want] if isinstance(want, Tensor) else [*want]
        got = toy.run(x)
        assert len(want) == count
        torch.testing.assert_close(got[count:], want)
        torch.testing.assert_close(got[:count], [2 * y.flatten() for y in want])
    assert not late[1] or name == "last columns" or "keeps" in name
    assert toy.calls <= 3  # of chunks, where the last is as long as the first


def test_parts_lie_in_their_tensor() -> None:
    """Launches read parts where they are, also those that begin behind others."""

    def body(x: Tensor) -> tuple[Tensor, ...]:
        first, second = (x + 0).split([2, x.shape[0] - 2])
        rows = (x + 1).unbind(0)[3]
        out = torch.empty_like(second), torch.empty_like(rows)
        launch(second, out[0])
        launch(rows, out[1])
        return *out, first

    toy = Toy(body)
    for _ in range(5):
        x = torch.randn(5, 4)
        got = toy.run(x)
        torch.testing.assert_close(got, (2 * x[2:], 2 * x[3] + 2, x[:2]))
    assert toy.calls == 2


def test_parameter_that_is_no_argument_is_refused() -> None:
    """A record would hold its address. Asked for its shape, it says so to the recorder alone."""
    weight = torch.nn.Parameter(torch.randn(3))
    for ask in (lambda x: x * weight, lambda x: x + weight.shape[0], lambda x: x + weight.numel()):
        toy = Toy(ask)
        for _ in range(4):
            x = torch.randn(3)
            torch.testing.assert_close(toy.run(x), ask(x))
        assert toy.calls == 4


def test_strides_of_nothing_are_torchs_own() -> None:
    rule = {"shape": (0, 4), "stride": (9, 1)}
    Value("v", x := torch.empty(0, 4), **rule).expect_sizes(x)
    for wrong in ({**rule, "shape": (0, 5)}, {**rule, "shape": (2, 4)}):
        x = torch.empty(2 if wrong["shape"][0] else 0, 4)
        with pytest.raises(Unrecordable):
            Value("v", x, **wrong).expect_sizes(x)

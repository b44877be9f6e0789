"""A call that is played from its record does what the call would have done."""

import math
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.runtime import call_replay, custom_op
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.launch_cache import by_sizes
from tests.support import wants
from tests.support.recorded import Toy, launch, record_on_cpu

if HAVE_TRITON:
    from triton import knobs

pytestmark = wants.triton


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)


def agree(toy: Toy, want: Callable[..., Any], make: Callable[[], tuple], played: int = 3) -> None:
    for _ in range(2 + played):
        args = make()
        expected = want(*[x.clone() if isinstance(x, Tensor) else x for x in args])
        got = toy.run(*args)
        torch.testing.assert_close(got, expected)
    assert toy.calls == 2


def doubled_sum(x: Tensor, z: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, w = torch.empty_like(x), x.new_empty(2, *x.shape)
    launch(x, y)
    launch(y, w[1])
    return y, w[1] + (0 if z is None else scale * z)


def test_replay_matches_call() -> None:
    def want(x: Tensor, z: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        return 2 * x, 4 * x + (0 if z is None else scale * z)

    agree(Toy(doubled_sum), want, lambda: (torch.randn(3, 4), torch.randn(3, 4), 0.5))
    agree(Toy(doubled_sum), want, lambda: (torch.randn(3, 4), None, 0.5))
    agree(Toy(doubled_sum), want, lambda: (torch.randn(4, 3).mT, torch.randn(3, 1), 2.0))


def test_replay_forgets_aliased_tensors() -> None:
    toy, x = Toy(lambda x, y: x - y), torch.randn(5)
    for _ in range(3):
        assert not toy.run(x, x).any()
    y = torch.randn(5)
    torch.testing.assert_close(toy.run(x, y), x - y)
    assert toy.calls == 2


def test_negated_views_have_their_sign() -> None:
    """The imaginary part of a conjugate has the address, shape and stride of the other's."""

    def body(x: Tensor) -> Tensor:
        y = torch.empty(1)
        launch(x, y)
        return y

    toy = Toy(body)
    for _ in range(4):
        z = torch.randn(1, dtype=torch.complex64)
        for x in (z.imag, z.conj().imag):
            torch.testing.assert_close(toy.run(x), 2 * x)
    assert toy.calls == 2 + 4


def test_views_and_operations_are_played_sooner() -> None:
    """Views of memory of the call, those that change nothing, zeros, and torch's methods."""

    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty(2, 3, 4)
        launch(x, y)
        same, inner = y.view(2, 3, 4), y[1, :, 1:].t()
        count = torch.zeros(3, dtype=torch.int32)
        bits = y.sum(0).view(torch.int32)
        return same, inner, inner.sum([0]), y[0].double(), count, bits, x.view(-1)[2:]

    def want(x: Tensor) -> tuple[Tensor, ...]:
        y = 2 * x
        inner = y[1, :, 1:].t()
        bits = y.sum(0).view(torch.int32)
        count = torch.zeros(3, dtype=torch.int32)
        return y, inner, inner.sum(0), y[0].double(), count, bits, x.flatten()[2:]

    toy, wide = Toy(body), torch.randn(9, 2, 3, 4)
    toy.run = custom_op.DirectCall(toy.run.impl, max_operations=None)
    agree(toy, want, lambda: (wide[4],))
    for i in range(9):  # views of an argument lie where that one does
        torch.testing.assert_close(toy.run(wide[i]), want(wide[i]))
    found = toy.run(wide[0])
    assert found[4].add_(1).tolist() == toy.run(wide[0])[4].add_(1).tolist() == [1, 1, 1]


def test_in_place_reaches_the_argument() -> None:
    def body(state: Tensor, x: Tensor) -> Tensor:
        state *= 2
        state.add_(x)
        y = torch.empty_like(x)
        launch(state, y)
        return y

    toy, state, want = Toy(body), torch.ones(4), torch.ones(4)
    for _ in range(5):
        x = torch.randn(4)
        want = 2 * want + x
        torch.testing.assert_close(toy.run(state, x), 2 * want)
        torch.testing.assert_close(state, want)
    assert toy.calls == 2


def test_version_of_written_argument_rises() -> None:
    """Autograd does not see what kernels write."""
    toy, state, x = Toy(lambda state, x: launch(x, state)), torch.zeros(4), torch.randn(4)
    toy.run = custom_op.DirectCall(toy.run.impl, written={0: "state"})
    for _ in range(5):
        versions = state._version, x._version
        toy.run(state, x)
        assert state._version > versions[0] and x._version == versions[1]
    torch.testing.assert_close(state, 2 * x)
    assert toy.calls == 2


def test_operations_without_tensors_are_no_steps() -> None:
    def body(x: Tensor, z: Tensor) -> Tensor:
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, z.dtype))
        launch(x, y)
        return y

    agree(Toy(body), lambda x, z: 2 * x, lambda: (torch.randn(4), torch.randn(4).half()))


def _made(make: Callable[..., Tensor], alive: list[weakref.ref], *sizes: Any) -> Tensor:
    x = make(*sizes)
    alive.append(weakref.ref(x))
    return x


def test_temporaries_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor) -> Tensor:
        for _ in range(4):
            y = torch.empty_like(x)
            launch(x, y)
            x = y
        return x

    for most, gone in ((0, 3), (1 << 20, 0)):
        monkeypatch.setattr(call_replay, "MAX_WORKSPACE_BYTES", most)
        alive: list[weakref.ref] = []
        record = call_replay.record(body, (torch.ones(3),))[1]
        assert record is not None
        make = torch.empty(0).new_empty_strided
        made = partial(_made, make, alive)
        scope = record._function.__globals__
        fresh = [name for name, x in scope.items() if x == make or "new_empty" in repr(x)]
        scope |= dict.fromkeys([x for x in fresh if x != "W"], made)
        assert record.play((torch.ones(3),)).tolist() == [16.0] * 3
        assert len(alive) == 1 + gone and not any(x() is not None for x in alive)


def test_temporaries_are_places_of_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor) -> Tensor:
        first = torch.empty_like(x)
        launch(x, first)
        for _ in range(3):
            y = torch.empty_like(x, dtype=x.dtype)
            launch(x, y)
            x = y
        wide, sum_of = x.new_empty(400, 3), torch.empty_like(x)
        launch(x, wide[7])
        launch(first, sum_of)
        return wide[7] + sum_of

    def want(x: Tensor) -> Tensor:
        return 20 * x

    x = torch.randn(3)
    for most, together in ((1 << 20, True), (1024, False)):
        monkeypatch.setattr(call_replay, "MAX_WORKSPACE_BYTES", most)
        taken = call_replay.record(body, (x,), max_operations=0)[1]
        assert taken is not None  # of operations there is the sum alone, fewer than launches
        with mock.patch.dict(
            taken._function.__globals__, {"W": mock.Mock(side_effect=ValueError("one"))}
        ):
            if together:
                with pytest.raises(ValueError, match="one"):
                    taken.play((x,))
            else:
                torch.testing.assert_close(taken.play((x,)), want(x))
        agree(Toy(body), want, lambda: (torch.randn(3),))


def test_records_hold_for_other_sizes() -> None:
    """A third call on, of sizes not seen before, is played; where the operator decides otherwise it
    is recorded again."""

    def body(x: Tensor, z: Tensor | None, n: int) -> tuple[Tensor, ...]:
        B, T, D = x.shape
        y, wide = x.new_empty(B, T, D), torch.empty(2, B * T, D)
        launch(x.contiguous(), wide[1])
        launch(wide[1], y)
        if T > 8:
            y.add_(n)
        rows = wide.narrow(0, 1, 1).view(B, T, D)
        return y.view(B * T, -1), rows.sum(1), torch.zeros(-(-T // n), B), y[:, 1:].mT

    def want(x: Tensor, z: Tensor | None, n: int) -> tuple[Tensor, ...]:
        y = 4 * x + (n if x.shape[1] > 8 else 0)
        zeros = torch.zeros(-(-x.shape[1] // n), x.shape[0])
        return y.view(-1, x.shape[2]), 2 * x.sum(1), zeros, y[:, 1:].mT

    toy, random = Toy(body), Random(0)
    for _ in range(60):
        B, T, D = (random.randint(1, 12) for _ in range(3))
        x, n = torch.randn(B, T, 4 * D), random.randint(1, 5)
        torch.testing.assert_close(toy.run(x, None, n), want(x, None, n))
    assert toy.calls <= 6


def test_sizes_that_take_turns_are_computed_once() -> None:
    """As those of a model's layers do, step by step."""

    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch(x, y)
        return y

    record = call_replay.record(body, (torch.randn(3, 4),))[1]
    assert record is not None
    scope = record._function.__globals__
    scope["sizes"] = mock.Mock(side_effect=scope["sizes"])
    for n in [*range(1, 9)] * 3:
        x = torch.randn(n, 4)
        torch.testing.assert_close(record.play((x,)), 2 * x)
    assert scope["sizes"].call_count == 8


def test_sizes_used_as_numbers_are_no_secret() -> None:
    """What a size decides by other means than comparisons, the record holds for that size alone."""
    tables: dict[Any, float] = {}

    def body(x: Tensor) -> Tensor:
        n = x.shape[0]
        y = torch.empty_like(x)
        launch(x, y)
        factor = tables.setdefault(n, float(n)) + len(range(n)) + math.isqrt(n) + [1, 2, 3][n % 3]
        return y * (factor + float(f"{n}"))

    toy = Toy(body)
    for turn in range(40):
        n = 1 + turn % 5
        x = torch.randn(n)
        torch.testing.assert_close(toy.run(x), 2 * x * (3 * n + math.isqrt(n) + 1 + n % 3))
    assert toy.calls == 2 * 5


def test_policy_is_one_line_of_a_record() -> None:
    """Its own decisions are no guards."""

    class Cut(NamedTuple):
        count: int
        each: int

    @by_sizes
    def cut(n: int) -> Cut | None:
        return None if n % 7 == 0 else Cut(1 + n % 3, sum(range(n)))

    def body(x: Tensor) -> Tensor:
        found = cut(x.shape[0])
        y = torch.empty_like(x)
        launch(x, y)
        return y if found is None else y * found.count + found.each

    toy = Toy(body)
    for n in [*range(1, 30), *range(1, 30)]:
        x, found = torch.randn(n), cut(n)
        right = 2 * x if found is None else 2 * x * found.count + found.each
        torch.testing.assert_close(toy.run(x), right)
    assert toy.calls <= 4


def test_sizes_that_guards_equate_are_one() -> None:
    """A record computes nothing of numbers alone, nor twice, and still refuses other sizes."""

    @by_sizes
    def padded(n: int) -> int:
        return n + 3

    def body(x: Tensor, z: Tensor) -> Tensor:
        n, d = z.shape[0], x.shape[1]
        if n != x.shape[0] or d != 8 or padded(d) != 11:
            return x
        y = x.new_empty(n * (d.bit_length() - 4 - padded(x.shape[1]) + 12), -(-d // 8) * d)
        launch(x.contiguous(), y)
        return y.view(n * d)

    x, z = torch.randn(5, 8), torch.randn(5)
    taken = call_replay.record(body, (x, z))[1]
    assert taken is not None
    sizes = taken.source.partition("def play")[0]
    computed = re.findall(r" [su]\d+ = (.*)", sizes)
    assert computed and all(re.search("[a-z]", x) for x in computed), sizes
    assert len({*computed}) == len(computed) and sum("f" in x for x in computed) == 1
    assert min(map(sizes.count, ("x0_0", "x1_0"))) == 2, sizes  # where it is read and compared
    for n in range(1, 9):
        x, z = torch.randn(n, 8), torch.randn(n)
        torch.testing.assert_close(taken.play((x, z)), 2 * x.flatten())
        for wrong in ((x, torch.randn(n + 1)), (torch.randn(n, 7), z)):
            assert taken.play(wrong) is call_replay.MISS


def test_late_refusal_leaves_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that only a result has cannot send back a call that has written."""

    def body(state: Tensor, x: Tensor) -> Tensor:
        y = x.tile(2)
        launch(x, state)
        return y + 1 if y.shape[0] > 8 else y

    toy = Toy(body)
    toy.run = custom_op.DirectCall(toy.run.impl, written={0: "state"})
    for n in (3, 3, 3, 7, 7, 2):
        x, state = torch.randn(n), torch.zeros(n)
        torch.testing.assert_close(toy.run(state, x), torch.cat([x, x]) + (n > 4))
        torch.testing.assert_close(state, 2 * x)
    assert toy.calls == 6


def test_replay_skips_host_reads() -> None:
    def item(x: Tensor) -> Tensor:
        return x + x.sum().item()

    def many(x: Tensor) -> Tensor:
        for _ in range(call_replay.MAX_OPERATIONS + 1):
            x = x + 1
        return x

    for body in (item, many):
        toy = Toy(body)
        for _ in range(4):
            x = torch.randn(3)
            torch.testing.assert_close(toy.run(x), body(x))
        assert toy.calls == 4


def test_threads_record_their_own() -> None:
    toy, errors = Toy(doubled_sum), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(3, 4, generator=generator)
            y, w = toy.run(x, x, 1.0)
            if not (torch.equal(y, 2 * x) and torch.allclose(w, 5 * x)):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_replay_notices_untold_launch() -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        knobs.runtime.launch_enter_hook(None)
        return y.copy_(x)

    toy = Toy(body)
    for _ in range(4):
        toy.run(torch.randn(3))
    assert toy.calls == 4


def test_autocast_does_not_reach_operations() -> None:
    toy, x = Toy(lambda x, w: x @ w), torch.randn(3, 3)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            assert toy.run(x, x).dtype == torch.float32
        assert toy.run(x, x).dtype == torch.float32
    assert toy.calls == 2  # played under autocast, too


def test_record_asks_where_an_argument_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls at which it decides otherwise get a record of their own."""
    record_on_cpu(monkeypatch)

    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch(x, y)
        return y if x.storage_offset() % 8 else y.neg()

    toy = Toy(body)
    memory = torch.arange(40.0)
    for at in (8, 8, 8, 4, 4, 4, 16, 12):
        x = memory[at : at + 8]
        assert torch.equal(toy.run(x), -2 * x if at % 8 == 0 else 2 * x)
    assert toy.calls == 4

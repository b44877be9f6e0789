"""Long calls in slices are the calls as a whole, to the last bit."""

from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from slipstream.kernels.linear import gated_delta_product, gsa, op, workspace
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.inputs import LinearInputs

K, V, H, T, SCALE, CHUNK = 8, 12, 2, 150, 0.3, 32


def gates(*shape: int) -> torch.Tensor:
    return -torch.rand(1, T, H, *shape)


KINDS: dict[str, Any] = {
    "delta": lambda: {"beta": torch.rand(1, T, H), "g": gates()},
    "kda": lambda: {"beta": torch.rand(1, T, H), "g": gates(K)},
    "dplr": lambda: {
        "g": gates(K),
        "a": normalize(torch.randn(1, T, H, K), dim=-1),
        "b": -0.5 * normalize(torch.randn(1, T, H, K), dim=-1),
    },
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("spans", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_spans_equal_whole(kind: str, spans: int, with_state: bool) -> None:
    q, k = torch.randn(1, T, H, K), normalize(torch.randn(1, T, H, K), dim=-1)
    state = torch.randn(1, H, K, V) if with_state else None
    terms = LinearInputs(q, k, torch.randn(1, T, H, V), **KINDS[kind](), initial_state=state)
    o, final = op.forward_impl(*terms, SCALE, CHUNK, "eager", False)
    cut, end, marks = op.forward_impl(*terms, SCALE, CHUNK, "eager", False, spans)
    assert marks.shape == (spans - 1, *final.shape)
    assert torch.equal(o, cut)
    assert torch.equal(final, end)

    def run(terms: LinearInputs, do: Any, dfinal: Any, scale: float, out: dict) -> dict:
        return chunk_backward(terms, do, dfinal, scale, CHUNK)

    do = torch.randn_like(o)
    for dfinal in (None, torch.randn_like(final)):
        want = chunk_backward(terms, do, dfinal, SCALE, CHUNK)
        parts = workspace.bwd_slices(terms, marks)
        got = workspace.backward(run, terms, do, dfinal, SCALE, parts, marks)
        assert set(want) == set(got)
        for name, x in want.items():
            assert torch.equal(x, got[name]), name


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("lengths", [(63, 0, 1, 65, 21), (0, 150), (40, 24, 1, 85, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_spans_are_near_whole(kind: str, lengths: tuple[int, ...], with_state: bool) -> None:
    q, k = torch.randn(1, T, H, K), normalize(torch.randn(1, T, H, K), dim=-1)
    state = torch.randn(len(lengths), H, K, V) if with_state else None
    terms = LinearInputs(q, k, torch.randn(1, T, H, V), **KINDS[kind](), initial_state=state)
    terms = terms._replace(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    o, final = op.forward_impl(*terms, SCALE, CHUNK, "eager", False)
    cut, end, marks = op.forward_impl(*terms, SCALE, CHUNK, "eager", False, 3)
    assert marks.shape == (2, 1, H, K, V)
    torch.testing.assert_close(cut, o)
    torch.testing.assert_close(end, final)

    def run(terms: LinearInputs, do: Any, dfinal: Any, scale: float, out: dict) -> dict:
        return chunk_backward(terms, do, dfinal, scale, CHUNK)

    do = torch.randn_like(o)
    for dfinal in (None, torch.randn_like(final)):
        want = chunk_backward(terms, do, dfinal, SCALE, CHUNK)
        parts = workspace.bwd_slices(terms, marks)
        got = workspace.backward(run, terms, do, dfinal, SCALE, parts, marks)
        assert set(want) == set(got)
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, atol=2e-5, rtol=2e-5)


def test_slices_hold_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MIN_ACTIVE_PROGRAMS", 1)
    for B, T, count in ((1, 200, 3), (1, 64, 4), (5, 7, 2), (1, 40960, 2)):
        q, v = torch.empty(B, T, 1, 8), torch.empty(B, T, 1, 8)
        seen = torch.zeros(B, T, dtype=torch.int)
        found = workspace._make_slices(LinearInputs(q, q, v), count)
        assert len(found) <= count
        for rows, tokens in found:
            seen[rows, tokens] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize("transition", ["none", "delta", "dplr"])
def test_slices_leave_what_is_allowed(transition: str, decay: str) -> None:
    size, width = (1, 8192, 32), 128
    make: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    x, one = torch.empty(*size, width, **make), torch.empty(*size, device="meta")
    g = {"none": None, "scalar": one, "channel": x.float()}[decay]
    beta = one if transition == "delta" else None
    a = x if transition == "dplr" else None
    terms = LinearInputs(x, x, x, g=g, beta=beta, a=a, b=a)
    given = sum(y.nbytes for y in terms if y is not None) + x.nbytes
    for grads in (False, True):
        room = (
            x.numel()
            // width
            * workspace._workspace_bytes(terms, grads)
            / workspace._num_slices(terms, grads)
        )
        assert room <= max(512 << 20, 0.5 * given * (2 if grads else 1))


@pytest.mark.parametrize("with_states", [False, True])
def test_slots_in_spans_equal_whole(with_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    M = 16
    sizes = [(1, T, H, n) for n in (K, K, V, M)]
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    given.append(gates(M).requires_grad_())
    if with_states:
        states = torch.randn(1, H, K, M), torch.randn(1, H, M, V)
        given += [x.requires_grad_() for x in states]
    found = []
    for little in (1 << 40, 0):
        monkeypatch.setattr(gsa, "SMALL_OUTPUT", little)
        with torch.no_grad():
            alone = gsa.attend(gsa.GSAInputs(*given), SCALE, CHUNK, "eager", "eager")
        outs = gsa.attend(gsa.GSAInputs(*given), SCALE, CHUNK, "eager", "eager")
        loss = torch.stack([(x**2).sum() for x in outs]).sum()
        found.append([*alone, *outs, *torch.autograd.grad(loss, given)])
    for whole, cut in zip(*found):
        assert torch.equal(whole, cut)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_steps_in_spans_equal_whole(
    gated: bool, with_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 2
    monkeypatch.setattr(gated_delta_product, "num_slices", lambda *_: 3)
    given: dict[str, Any] = {
        "q": torch.randn(1, T, H, K),
        "k": normalize(torch.randn(1, T * n, H, K), dim=-1),
        "v": torch.randn(1, T * n, 2 * H, V),
        "beta": torch.rand(1, T * n, 2 * H),
        "g": -torch.rand(1, T, 2 * H) if gated else None,
        "state": torch.randn(1, 2 * H, K, V) if with_state else None,
    }
    leaves = [x.requires_grad_() for x in given.values() if x is not None]
    steps = gated_delta_product.Steps(**given)
    do, dfinal = torch.randn(1, T, 2 * H, V), torch.randn(1, 2 * H, K, V)
    whole = op.linear(steps.terms(slice(0, T), steps.state, "eager"), SCALE, CHUNK, "eager")
    found = []
    for o, final in (
        (whole[0][:, n - 1 :: n], whole[1]),
        gated_delta_product.product(steps, SCALE, CHUNK, "eager"),
    ):
        loss = (o * do).sum() + (final * dfinal).sum()
        found.append([o, final, *torch.autograd.grad(loss, leaves)])
    for x, y in zip(*found):
        assert torch.equal(x, y)


def test_span_ops_pass_opcheck() -> None:
    terms = LinearInputs(*(torch.randn(1, T, H, K) for _ in range(3)), beta=torch.rand(1, T, H))
    spans_op: Any = op._call_slices.overload
    torch.library.opcheck(spans_op, (*terms, SCALE, CHUNK, "eager", False, 2))
    given = gsa.GSAInputs._make([*torch.randn(4, 1, T, H, 16), gates(16), None, None, None])
    options = (SCALE, CHUNK, "eager", "eager")
    for keep in (True, False):
        torch.library.opcheck(gsa._call_forward.overload, (*given, *options, 2, keep))
    o, _, _, *kept = gsa._forward(*given, *options, 2, True)
    torch.library.opcheck(gsa._call_backward.overload, (*given, *kept, o, None, None, *options))
    q, k = torch.randn(1, T, H, K), normalize(torch.randn(1, 2 * T, H, K), dim=-1)
    steps = gated_delta_product.Steps(q, k, torch.randn(1, 2 * T, H, V), torch.rand(1, 2 * T, H))
    options = (SCALE, CHUNK, "eager")
    torch.library.opcheck(gated_delta_product._call_forward.overload, (*steps, *options, 2))
    o, _, marks = gated_delta_product._forward(*steps, *options, 2)
    torch.library.opcheck(
        gated_delta_product._call_backward.overload, (*steps, marks, o, None, *options)
    )


def test_state_gradients_are_rounded_once() -> None:
    """Between spans they are in float32."""
    x = torch.randn(1, 256, 1, 8)
    state = torch.randn(1, 1, 8, 8).bfloat16()
    terms = LinearInputs(x, x, x, beta=torch.rand(1, 256, 1), initial_state=state)
    seen: list[torch.dtype] = []

    def run(
        terms: LinearInputs, do: torch.Tensor, dfinal: torch.Tensor, scale: float, out: dict
    ) -> dict[str, torch.Tensor]:
        seen.append(out["initial_state"].dtype)
        made = {name: torch.zeros_like(y) for name, y in out.items()}
        return made | {"initial_state": dfinal * (1 + 2**-12)}

    dfinal, marks = torch.ones(1, 1, 8, 8), torch.zeros(3, 1, 1, 8, 8)
    parts = [workspace.BatchTimeSlice(slice(None), slice(t, t + 64)) for t in range(0, 256, 64)]
    grads = workspace.backward(run, terms, x, dfinal, 1.0, parts, marks)
    assert seen == [torch.float32] * 4
    want = (dfinal * (1 + 2**-12) ** 4).bfloat16()
    assert grads["initial_state"].dtype == torch.bfloat16
    assert torch.equal(grads["initial_state"], want)

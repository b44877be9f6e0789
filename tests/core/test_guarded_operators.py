"""Every operator through its public function, on a machine whose compilers nobody has verified.

The launches are planted: they do what the kernels do in plain torch, or die, or are wrong. Only the
GPU is missing: the operators take their Triton path on the CPU.
"""

import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import kernels, ops
from slipstream.core import guard, machine, probe
from slipstream.kernels import launching
from slipstream.kernels.conv import plain as conv_plain
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.loss import eager as loss_eager
from slipstream.kernels.norm import plain as norm_plain
from slipstream.kernels.pointwise import activation, linear, rotary, token_shift
from slipstream.kernels.scan import eager as scan_eager
from slipstream.kernels.softmax import cache, eager
from slipstream.ops.activation import glu_linear

pytestmark = pytest.mark.skipif(
    not launching.HAVE_TRITON or launching.INTERPRETED, reason="wants Triton, not interpreted"
)
KERNELS = "slipstream.kernels"


@dataclass(frozen=True)
class Family:
    """launches: module and name -> the same in plain torch. chooses: modules of choose_impl."""

    name: str
    call: Callable[[], list[Tensor]]
    launches: dict[str, Callable]
    chooses: tuple[str, ...] = ()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


def chunk() -> list[Tensor]:
    q, k, v = (leaf(1, 20, 2, 8) for _ in range(3))
    return gradients(ops.chunk_retention(q, k, v)[0], q, k, v)


def delta() -> list[Tensor]:
    q, k, v = (leaf(1, 20, 2, 8) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    return gradients(ops.chunk_delta_rule(q, k, v, torch.rand(1, 20, 2))[0], q, v)


def step() -> list[Tensor]:
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in range(3))
    state = torch.randn(2, 2, 8, 8)
    return [ops.recurrent_step(q, k, v, state=state), state]


def scan() -> list[Tensor]:
    x, g = leaf(1, 20, 8), -torch.rand(1, 20, 8)
    return gradients(ops.chunk_hgrn(x, g)[0], x)


def norm() -> list[Tensor]:
    x, weight, bias = leaf(5, 8), leaf(8), leaf(8)
    return gradients(ops.layer_norm(x, weight, bias), x, weight, bias)


def conv() -> list[Tensor]:
    x, weight = leaf(1, 20, 8), leaf(8, 4)
    return gradients(ops.short_convolution(x, weight, activation="silu")[0], x, weight)


def conv_update() -> list[Tensor]:
    x, state, weight = torch.randn(3, 8), torch.randn(3, 8, 4), torch.randn(8, 4)
    return [ops.short_convolution_update(x, state, weight), state]


def loss() -> list[Tensor]:
    logits = leaf(6, 10)
    return gradients(ops.cross_entropy(logits, torch.randint(0, 10, (6,))), logits)


def linear_loss() -> list[Tensor]:
    hidden, weight = leaf(6, 8), leaf(10, 8)
    target = torch.randint(0, 10, (6,))
    return gradients(ops.linear_cross_entropy(hidden, weight, target), hidden, weight)


def glu() -> list[Tensor]:
    gate, up = leaf(5, 8), leaf(5, 8)
    return gradients(ops.swiglu(gate, up), gate, up)


def joined() -> list[Tensor]:
    gate, up, weight = leaf(5, 8), leaf(5, 8), leaf(3, 8)
    return gradients(glu_linear(gate, up, weight), gate, up, weight)


def shift() -> list[Tensor]:
    x = leaf(1, 6, 8)
    return gradients(ops.token_shift(x)[0], x)


def turn() -> list[Tensor]:
    x = leaf(1, 6, 2, 8)
    cos, sin = ops.rotary_tables(torch.arange(6), 8)
    return gradients(ops.rotary_embedding(x, cos, sin), x)


def attention() -> list[Tensor]:
    q, k, v = (leaf(1, 20, 2, 8) for _ in range(3))
    return gradients(ops.attention(q, k, v, causal=True), q, k, v)


def decode() -> list[Tensor]:
    q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    lengths = torch.tensor([7, 30], dtype=torch.int32)
    out = ops.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert isinstance(out, Tensor)
    return [out]


def _rows(logits: Tensor, target: Tensor, terms: Any, **made: Any) -> None:
    grad, weight = made.get("grad"), made.get("weight")
    r = loss_eager.rows(logits.float().clone(), target, terms)
    if not made.get("has_lse"):
        made["loss"].copy_(r.loss)
    if grad is not None:
        grad.copy_(loss_eager.dlogits(r, weight, terms))


LOSS = {
    "loss.triton.launch:cross_entropy": _rows,
    "loss.triton.launch:inverse_count": lambda t, i: 1 / (t != i).sum().float(),
    "loss.triton.launch:scale_": lambda x, s: x.mul_(s),
    "loss.triton.launch:linear_rows": lambda h, w, b, t, d, *rest: loss_eager.linear_rows(
        h, w, b, t, None if d is None else d.expand(t.shape), *rest
    ),
}
LINEAR = {
    "forward": lambda terms, scale: chunk_forward(terms, scale, 16),
    "backward": lambda terms, do, dfinal, scale, **_: chunk_backward(terms, do, dfinal, scale, 16),
}


def _update(terms: Any, state: Tensor, indices: Any, scale: float, l2_norm: bool) -> Tensor:
    o, final = recurrent_forward(terms._replace(initial_state=state), scale)
    state.copy_(final)
    return o


FAMILIES = [
    Family(
        "linear.triton none", chunk, {f"linear.triton.launch:{k}": v for k, v in LINEAR.items()}
    ),
    Family(
        "linear.triton delta",
        delta,
        {f"linear.triton.delta_launch:{k}": v for k, v in LINEAR.items()},
    ),
    Family(
        "linear.step",
        step,
        {
            "linear.triton.step_launch:update": _update,
            "linear.triton.step_launch:forward": recurrent_forward,
        },
    ),
    Family(
        "scan.triton",
        scan,
        {
            "scan.triton.launch:forward": scan_eager.scan_forward,
            "scan.triton.launch:backward": scan_eager.scan_backward,
        },
    ),
    Family(
        "norm.triton",
        norm,
        {
            "norm.triton.launch:forward": norm_plain.forward,
            "norm.triton.launch:backward": norm_plain.backward,
        },
        ("slipstream.kernels.norm.call",),
    ),
    Family(
        "conv.triton",
        conv,
        {
            "conv.triton.launch:forward": conv_plain.forward,
            "conv.triton.launch:backward": conv_plain.backward,
        },
        ("slipstream.ops.conv",),
    ),
    Family(
        "conv.update",
        conv_update,
        {"conv.triton.launch:update": conv_plain.update},
        ("slipstream.ops.conv",),
    ),
    Family("cross_entropy.triton", loss, LOSS, ("slipstream.ops.loss",)),
    Family("cross_entropy.triton", linear_loss, LOSS, ("slipstream.ops.loss",)),
    Family(
        "glu.triton",
        glu,
        {
            "pointwise.triton.glu:glu": activation._plain,
            "pointwise.triton.glu:glu_backward": activation._plain_backward,
        },
        ("slipstream.kernels.pointwise.activation",),
    ),
    Family(
        "glu_again.triton",
        joined,
        {
            "pointwise.triton.glu:glu": activation._plain,
            "pointwise.triton.glu:glu_backward": activation._plain_backward,
            "pointwise.triton.glu_again:glu_again": linear._plain_again,
        },
        ("slipstream.kernels.pointwise.activation",),
    ),
    Family(
        "token_shift.triton",
        shift,
        {"pointwise.triton.token_shift:shift": token_shift._plain},
        ("slipstream.kernels.pointwise.token_shift",),
    ),
    Family(
        "rotary.triton",
        turn,
        {"pointwise.triton.rotary:turn": rotary._plain},
        ("slipstream.ops.rotary",),
    ),
    Family(
        "softmax.triton",
        attention,
        {
            "softmax.triton.launch:forward": eager.forward,
            "softmax.triton.launch:backward": eager.backward,
        },
    ),
    Family(
        "softmax.decode",
        decode,
        {"softmax.triton.decode_launch:decode": lambda c, o: eager.forward(cache.gathered(c), o)},
    ),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.call.__name__)


def plant(
    patch: pytest.MonkeyPatch, family: Family, change: Callable[[Callable], Callable]
) -> None:
    for place, plain in family.launches.items():
        module, _, name = place.partition(":")
        patch.setattr(importlib.import_module(f"{KERNELS}.{module}"), name, change(plain))


def wrong(plain: Callable) -> Callable:
    """1.2 times what it should be, in every tensor returned or written."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        for x in (kwargs.get("loss"), kwargs.get("grad")):
            if x is not None:
                x.mul_(1.2)
        if isinstance(out, Tensor):
            return out * 1.2
        if isinstance(out, dict):
            return {name: x * 1.2 for name, x in out.items()}
        return out if out is None else tuple(x if x is None else x * 1.2 for x in out)

    return launch


def dies(plain: Callable) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        raise guard.Unusable("planted_kernel: the compiler's process died, killed by SIGABRT")

    return launch


def refuses(plain: Callable) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    return launch


@pytest.fixture
def unverified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[], machine.Machine]]:
    """Makes machines, each what a new process would find; operators take their Triton path."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    for found in pkgutil.walk_packages(kernels.__path__, f"{KERNELS}."):
        importlib.import_module(found.name)  # which copy INTERPRETED, and are to have the real one
    monkeypatch.setattr(launching, "INTERPRETED", True)
    family: Family = request.getfixturevalue("family")
    for module in family.chooses:
        monkeypatch.setattr(f"{module}.choose_impl", lambda *args: "triton|eager")

    def make() -> machine.Machine:
        found = machine.Machine("sm_90", "3.6.0", "1.2.3")
        monkeypatch.setattr(guard, "machine", lambda device: found)
        _forget_plans()
        return found

    yield make
    _forget_plans()


def _forget_plans() -> None:
    from slipstream.kernels.linear import call
    from slipstream.kernels.linear import step as stepping

    for plans in (call._PLANS, stepping._PLANS):
        plans._by_key.clear()


def results(family: Family) -> list[Tensor]:
    torch.manual_seed(3)
    return family.call()


@every_family
@pytest.mark.parametrize(
    ("fate", "words"),
    [(dies, "SIGABRT"), (refuses, "PassManager"), (wrong, "wrong result: .* is off by .*")],
    ids=["dies", "refuses", "wrong"],
)
def test_a_failing_kernel_gives_way_to_plain_torch(
    family: Family,
    fate: Callable,
    words: str,
    unverified: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a warning that says why; the next process knows."""
    with monkeypatch.context() as patch:
        patch.setattr(launching, "INTERPRETED", False)
        for module in family.chooses:
            patch.setattr(f"{module}.choose_impl", lambda *args: "eager")
        want = results(family)
    plant(monkeypatch, family, fate)
    for is_new in (True, False):
        here = unverified()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", guard.Guarded)
            got = results(family)
        if is_new:
            assert any(re.match(f"{family.name} .*{words}", str(x.message)) for x in said)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert any(kind.startswith(family.name) for kind in here.remembered["unusable"])
        if not is_new:
            assert not any(str(kind[0]) in family.name for kind in here.admitted)


@every_family
def test_sound_kernels_are_probed_once_and_then_only_launched(
    family: Family, unverified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []
    run = probe.mismatch

    def noted(*args: Any, **kwargs: Any) -> str | None:
        probes.append("probed")
        return run(*args, **kwargs)

    monkeypatch.setattr(probe, "mismatch", noted)
    plant(monkeypatch, family, lambda plain: plain)
    here = unverified()
    with warnings.catch_warnings():
        warnings.simplefilter("error", guard.Guarded)
        results(family)
        assert len(probes) >= 1 and here.remembered["probed"]
        probes.clear()
        results(family)
        unverified()
        results(family)
    assert not probes


@every_family
def test_a_verified_machine_looks_at_nothing(
    family: Family, unverified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = frozenset(machine.families())
    monkeypatch.setattr(machine, "verified", lambda: {("sm_90", "3.6.0", "1.2.3"): everything})
    monkeypatch.setattr(guard, "_admit", lambda *args: pytest.fail("looked"))
    plant(monkeypatch, family, lambda plain: plain)
    assert unverified().quiet
    results(family)


@pytest.mark.parametrize("family", [x for x in FAMILIES if x.call is attention], ids=["attention"])
@pytest.mark.parametrize("dying", ["forward", "backward"])
@pytest.mark.parametrize("portable", [lambda plain: plain, dies], ids=["sound", "dies too"])
def test_the_kernels_after_those_of_sm_90_are_the_portable_ones(
    family: Family,
    dying: str,
    portable: Callable,
    unverified: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of "hopper|triton|eager", the first that works; plain torch only where both die."""
    ran: list[str] = []

    def noting(name: str, launch: Callable) -> Callable:
        return lambda *args: ran.append(name) or launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(launching, "INTERPRETED", False)
        want = results(family)
    plant(monkeypatch, family, lambda plain: noting("triton", portable(plain)))
    for name in ("forward", "backward"):
        plain = getattr(eager, name)
        launch = noting("hopper", dies(plain) if name == dying else plain)
        monkeypatch.setattr(f"{KERNELS}.softmax.hopper.launch.{name}", launch)
    monkeypatch.setattr(f"{KERNELS}.softmax.call.hopper_refuses", lambda *call: None)
    here = unverified()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", guard.Guarded)
        got = results(family)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    both = portable is dies
    lost = ["softmax.hopper", *["softmax.triton"] * both]
    assert [str(x.message).split()[0] for x in said] == lost
    assert all("SIGABRT" in str(x.message) for x in said)
    assert [x.split()[0] for x in here.remembered["unusable"]] == lost
    assert ran[0] == "hopper" and "triton" in ran
    ran.clear()
    results(family)
    assert set(ran) == (set() if both else {"triton"})

"""Softmax attention's kernels on a GPU: against their formulas, their errors, dropout."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.op import softmax
from slipstream.kernels.attention.plan import FORWARD
from slipstream.kernels.attention.plan import sm90_unsupported_reason as unsupported_reason
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.sm90 import launch as sm90
from slipstream.kernels.attention.triton import launch as triton
from slipstream.kernels.attention.triton import tiles
from slipstream.ops.attention import attention
from tests.gpu.waiting import graph_of, waiting_is_an_error
from tests.support.attention_calls import CALLS, Call, check, got, incoming, want

# ---- The sm_90 attention kernels on a GPU, against the float64 reference and in a CUDA graph.


SM90_CALLS = [
    Call("full", B=2, T=333, S=517, H=2, HKV=2),
    Call("causal", B=2, T=700, S=700, H=4, HKV=2, right=0),
    Call("window", T=700, S=900, H=2, HKV=1, left=200, right=30),
    Call("softcap", T=400, S=400, right=0, softcap=5.0),
    Call("softcap, no mask", T=400, S=433, softcap=5.0),
    Call("softcap, window", T=400, S=500, left=150, right=20, softcap=5.0),
    Call("packed", T=700, S=700, q_lengths=(5, 0, 400, 295), k_lengths=(5, 0, 400, 295), right=0),
    Call("packed, no mask", T=700, S=700, q_lengths=(5, 0, 400, 295), k_lengths=(5, 0, 400, 295)),
    Call("used", B=3, T=200, S=450, used=(450, 9, 0), right=0),
    Call("sinks", B=2, T=300, S=300, H=4, HKV=2, right=0, has=frozenset({"sinks"})),
    Call("many", B=8, T=520, S=520, H=8, HKV=8, right=0),
]


def backend(D: int) -> Any:
    """With gradients, which heads of 512 have by the portable kernels."""
    return sm90 if D <= 256 else SimpleNamespace(forward=sm90.forward, backward=triton.backward)


def on_gpu(call: Call, D: int) -> AttentionInputs:
    terms = Call(**{**vars(call), "D": D, "DV": D, "scale": D**-0.5}).terms(torch.bfloat16)
    moved = AttentionInputs(*(None if x is None else x.cuda() for x in terms))
    if reason := unsupported_reason(moved, call.options):
        pytest.skip(reason)
    return moved


@pytest.mark.parametrize("D", [64, 128, 256, 512])
@pytest.mark.parametrize("call", SM90_CALLS, ids=lambda call: call.name)
def test_kernels_match_reference(call: Call, D: int) -> None:
    terms = on_gpu(call, D)
    do, dlse = (
        x.cuda()
        for x in incoming(AttentionInputs(*(None if x is None else x.cpu() for x in terms)))
    )
    options = AttentionOptions(D**-0.5, *call.options[1:])
    right = want(terms, options, do, dlse)
    found = got(backend(D), terms, options, do, dlse)
    check(found, right, 2e-2, call.name)
    torch.testing.assert_close(got(backend(D), terms, options, do, dlse), found, rtol=0, atol=0)


@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_packed_nan_stays_in_its_sequence(D: int) -> None:
    call = Call("pair", B=2, T=333, S=333, H=2, HKV=2, right=0)
    terms, options = on_gpu(call, D), AttentionOptions(D**-0.5, -1, 0)
    alone = AttentionInputs(*(x[:1].clone() for x in terms[:3]))
    do = torch.randn_like(terms.q)
    for x in (*terms[:3], do):
        x[1] = torch.nan
    found = got(backend(D), terms, options, do, None)
    for name, x in got(backend(D), alone, options, do[:1].clone(), None).items():
        assert torch.equal(found[name][:1], x), name


@pytest.mark.parametrize("D", [128, 512])
def test_graph_replays_with_other_lengths(D: int) -> None:
    packed = next(x for x in SM90_CALLS if x.name == "packed")
    terms, options = on_gpu(packed, D), AttentionOptions(D**-0.5, -1, 0)
    do = torch.randn_like(terms.q)
    graph, captured = graph_of(lambda: got(backend(D), terms, options, do, None))
    assert terms.cu_q is not None
    terms.cu_q.copy_(torch.tensor([0, 300, 300, 650, 700]))
    if terms.cu_k is not None and terms.cu_k is not terms.cu_q:
        terms.cu_k.copy_(terms.cu_q)
    graph.replay()
    right = got(backend(D), terms, options, do, None)
    torch.testing.assert_close(captured, right, rtol=0, atol=0)


# ---- The portable attention kernels on a GPU, every feature of the family's table of calls.


PORTABLE_WIDTHS = [(64, 64), (80, 96), (192, 128), (64, 256), (256, 256), (320, 288), (512, 512)]


@pytest.mark.parametrize(("D", "DV"), PORTABLE_WIDTHS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_portable_kernels_match_reference(call: Call, D: int, DV: int) -> None:
    """Gradients of sinks, gates and lse among them; the same bits twice."""
    here = Call(**{**vars(call), "D": D, "DV": DV}).terms(torch.bfloat16)
    terms = here._replace(**{n: x.cuda() for n, x in here._asdict().items() if x is not None})
    do, dlse = (x.cuda() for x in incoming(here))
    sign = -1 if call.scale < 0 else bool(call.scale)
    options = AttentionOptions(sign * D**-0.5, *call.options[1:])
    found = got(triton, terms, options, do, dlse)
    check(found, want(terms, options, do, dlse), 2e-2, call.name)
    torch.testing.assert_close(got(triton, terms, options, do, dlse), found, rtol=0, atol=0)


@pytest.mark.parametrize("call", SM90_CALLS, ids=lambda call: call.name)
def test_gradients_by_small_workspaces_are_the_same(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of queries at a time, and some of one head: sums in another order."""
    here = Call(**{**vars(call), "D": 512, "DV": 512}).terms(torch.bfloat16)
    terms = here._replace(**{n: x.cuda() for n, x in here._asdict().items() if x is not None})
    do, dlse = (x.cuda() for x in incoming(here))
    options = AttentionOptions(512**-0.5, *call.options[1:])
    right = got(triton, terms, options, do, dlse)
    for size in (1, 1 << 20):
        monkeypatch.setattr(tiles, "WORKSPACE_BYTES", size)
        check(got(triton, terms, options, do, dlse), right, 1e-2, call.name)


# ---- Attention's errors against float64 beside those of torch's own in the same precision. Fresh
# random data, odd lengths, windows narrower and wider than a tile, sequences without queries or
# keys, queries that see nothing: no result is off by more than one and a half times what torch's
# scaled_dot_product_attention is off by, on the same numbers.


LIMIT = 1.5
# B, T, S, H, HKV, left, right
CASES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "causal": (2, 777, 777, 4, 4, -1, 0),
    "full": (2, 333, 517, 4, 2, -1, -1),
    "narrow window": (1, 901, 901, 4, 2, 17, 0),
    "wide window": (1, 901, 1003, 2, 2, 300, 150),
    "blind rows": (1, 700, 300, 2, 1, -1, 0),
    "one key": (2, 129, 1, 2, 2, -1, -1),
}
WIDTHS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (100, 100), (192, 128), (64, 256),
          (128, 64), (512, 512)]  # fmt: skip


def torchs(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """torch's attention, by a mask where it wants one; a query that sees nothing gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    blind = ~seen.any(-1, keepdim=True)  # [1, T, 1]
    full = bool(seen.all())
    T, S = seen.shape[1:]
    causal = not full and T == S and torch.equal(seen, torch.ones_like(seen).tril())
    mask = None if full or causal else seen | blind
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return torch.where(blind, 0.0, o).transpose(1, 2)


def sight(T: int, S: int, left: int, right: int) -> Tensor:
    age = torch.arange(T, device="cuda")[:, None] + S - T - torch.arange(S, device="cuda")
    seen = torch.ones_like(age, dtype=torch.bool)
    if left >= 0:
        seen &= age <= left
    return seen & (age >= -right) if right >= 0 else seen


def error(got: Tensor, want: Tensor) -> float:
    off = (got.double() - want).square().mean().sqrt()
    return (off / want.square().mean().sqrt().clamp(min=1e-3)).item()


def with_gradients(run: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, do))))


def held_beside_torch(
    ours: dict[str, Tensor], torchs: dict[str, Tensor], want: dict[str, Tensor], label: str
) -> None:
    # a thirtieth of a rounding: where torch is exact, as with one key
    least = torch.finfo(ours["o"].dtype).eps / 78
    for name, right in want.items():
        assert ours[name].isfinite().all(), (label, name)
        mine, peers = error(ours[name], right), error(torchs[name], right)
        assert mine <= max(LIMIT * peers, least), f"{label} {name}: {mine:.2e}, torch {peers:.2e}"


def cases() -> Iterator[Any]:
    """All in bfloat16, and in float16 and float32 some of each."""
    for name in CASES:
        for D, DV in WIDTHS:
            for impl in ("sm90", "triton"):
                yield pytest.param(name, D, DV, impl, torch.bfloat16, id=f"{name}-{D}-{DV}-{impl}")
    for name in ("causal", "full", "narrow window", "blind rows"):
        for D, DV in ((64, 64), (128, 128), (256, 256), (192, 128), (100, 100)):
            for impl in ("sm90", "triton"):
                label = f"{name}-{D}-{DV}-{impl}-fp16"
                yield pytest.param(name, D, DV, impl, torch.float16, id=label)
    for name in ("causal", "narrow window", "blind rows"):
        for D, DV in ((64, 64), (128, 64), (100, 100)):
            yield pytest.param(name, D, DV, "triton", torch.float32, id=f"{name}-{D}-{DV}-fp32")


@pytest.mark.parametrize(("name", "D", "DV", "impl", "dtype"), list(cases()))
def test_errors_are_at_most_those_of_torch(
    name: str, D: int, DV: int, impl: str | None, dtype: torch.dtype
) -> None:
    B, T, S, H, HKV, left, right = CASES[name]
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    if impl == "sm90" and (D, DV) in FORWARD:
        impl = None  # which has the forward alone: by the plan
    q, do = torch.randn(B, T, H, D, **make), torch.randn(B, T, H, DV, **make)
    k, v = torch.randn(B, S, HKV, D, **make), torch.randn(B, S, HKV, DV, **make)
    scale, seen = D**-0.5, sight(T, S, left, right)[None]
    options: dict[str, Any] = {"window_size": (left, right), "causal": False, "impl": impl}
    try:
        ours = with_gradients(lambda *x: attention(*x, **options), q, k, v, do)
    except NotImplementedError as error:
        pytest.skip(str(error))
    peers = with_gradients(lambda q, k, v: torchs(q, k, v, seen, scale), q, k, v, do)
    want = with_gradients(
        lambda *x: softmax_reference(AttentionInputs(*x), AttentionOptions(scale, left, right))[0],
        q.double(), k.double(), v.double(), do.double(),
    )  # fmt: skip
    held_beside_torch(ours, peers, want, f"{name} {D}/{DV} {impl}")
    blind = ~seen[0].any(-1)
    _, lse = attention(q, k, v, **options, return_lse=True)
    assert not ours["o"][:, blind].any() and not ours["dq"][:, blind].any()
    assert torch.equal(lse == -torch.inf, blind.expand_as(lse))


@pytest.mark.parametrize("impl", ["sm90", "triton"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, 0), (40, 0), (200, 90)])
def test_packed_errors_are_at_most_those_of_torch(
    D: int, impl: str, window: tuple[int, int]
) -> None:
    """Sequences without queries, without keys, and with neither among them."""
    q_lengths, k_lengths = (5, 0, 400, 1, 0, 294), (0, 7, 500, 1, 0, 192)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    T, S, scale = sum(q_lengths), sum(k_lengths), D**-0.5
    q, k, v, do = (torch.randn(1, n, h, D, **make) for n, h in ((T, 4), (S, 2), (S, 2), (T, 4)))
    cu_q, cu_k = (
        torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (q_lengths, k_lengths)
    )
    rows = [sight(t, s, *window) for t, s in zip(q_lengths, k_lengths)]
    seen = torch.block_diag(*rows).bool()[None]
    ours = with_gradients(
        lambda *x: attention(
            *x, window_size=window, causal=False, cu_seqlens=cu_q, cu_seqlens_k=cu_k, impl=impl
        ),
        q, k, v, do,
    )  # fmt: skip
    peers = with_gradients(lambda q, k, v: torchs(q, k, v, seen, scale), q, k, v, do)
    terms: dict[str, Tensor] = {"cu_q": cu_q, "cu_k": cu_k}
    options = AttentionOptions(scale, *window)
    want = with_gradients(
        lambda *x: softmax_reference(AttentionInputs(*x, **terms), options)[0],
        q.double(), k.double(), v.double(), do.double(),
    )  # fmt: skip
    held_beside_torch(ours, peers, want, f"packed {D} {impl} {window}")


# ---- Attention's dropout by the kernels: the weights that plain torch drops, forward and
# backward.


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (130, 20), "causal": False, "softcap": 5.0},
    "packed": {"cu_seqlens": (0, 5, 5, 180, 300)},
    "few queries": {"key_lengths": (300,)},
}


def weights(impl: str, device: str) -> Tensor:
    """[T, H, T], of one seed: with v = 1, an output is its weights."""
    T = 128  # as wide as float32 goes
    q = torch.zeros(1, T, 2, 64, device=device)
    v = torch.eye(T, device=device)[None, :, None].expand(1, T, 2, T)
    seed = torch.tensor([1234567890123456789], device=device)
    terms = AttentionInputs(q, q, v, seed=seed)
    return softmax(terms, AttentionOptions(1.0, dropout=0.3), impl)[0][0]


def test_dropout_seed_is_portable() -> None:
    want = weights("eager", "cpu")
    for impl in ("eager", "triton"):
        got = weights(impl, "cuda").cpu()
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_kernels_equal_plain_torch(name: str, D: int) -> None:
    T = 3 if name == "few queries" else 300
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(1, T, 4, D, **make)
    k, v = (torch.randn(1, 300, 2, D, **make) for _ in range(2))
    options = {n: torch.tensor(x, device="cuda") if n in ("cu_seqlens", "key_lengths") else x
               for n, x in OPTIONS[name].items()}  # fmt: skip
    found = []
    for impl in ("triton", "triton", "eager"):
        torch.manual_seed(3)
        o = attention(q, k, v, dropout_p=0.2, impl=impl, **options)
        assert isinstance(o, Tensor)
        found.append([o.detach(), *torch.autograd.grad(o.float().square().sum(), (q, k, v))])
    for x, again, y in zip(*found, strict=True):
        assert torch.equal(x, again)
        assert float((x - y).float().norm() / y.float().norm()) < 2e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        o: Any = attention(q, k, v, dropout_p=0.5) if not checkpointed else checkpoint(
            lambda *x: attention(*x, dropout_p=0.5), q, k, v, use_reentrant=reentrant
        )  # fmt: skip
        torch.rand(7, device="cuda")
        o.square().sum().backward()
        grads.append([x.grad for x in (q, k, v)])
        q.grad = k.grad = v.grad = None
    for x, y in zip(grads[1], grads[0]):
        assert x is not None and y is not None and torch.equal(x, y)


def test_seeds_are_drawn_without_a_sync() -> None:
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))

    def train() -> None:
        o = attention(q, k, v, dropout_p=0.5)
        assert isinstance(o, Tensor)
        o.sum().backward()

    train()
    with waiting_is_an_error():
        train()

"""Plain torch: its two ways through lengths, its gradients, a cache of latents; a call's plan,
modes; the probe of attention's kernels, with plain torch in the place of the kernels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.kernels.attention import eager, op, probe, run
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import Asked, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.latent import eager_latent_attention, latent_attention
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.run import FORBIDDEN, MODES, Plan, make_plan
from slipstream.ops.attention import attention
from slipstream.runtime import kernel_pair
from slipstream.runtime.consistent import BLOCK
from tests.support.attention_calls import CALLS, Call, check, got, incoming, want
from tests.support.interpreted import interpreted

every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


@every_call
@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
def test_eager_matches_reference(call: Call, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "ROWS", 32)
    if not known:
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)
    # sums of gates reach 1e5, of which float64 keeps 1e-11
    exact = 1e-13 if "g" not in call.has else 1e-11
    for dtype, limit in ((torch.float64, exact), (torch.float32, 5e-6)):
        terms = call.terms(dtype)
        do, dlse = incoming(terms)
        right = want(terms, call.options, do, dlse)
        check(got(eager, terms, call.options, do, dlse), right, limit, call.name)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
@pytest.mark.parametrize("call", [x for x in CALLS if x.used], ids=lambda call: call.name)
def test_padding_may_be_nan(call: Call, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)
    terms = call.terms()
    do, dlse = incoming(terms)
    right = want(terms, call.options, do, dlse)

    def spoiled(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.clone()
        for n, length in enumerate(call.used or ()):
            if terms.cu_k is None:
                x[n, max(length, 0) :] = torch.nan
            else:
                begin, end = terms.cu_k[n : n + 2].tolist()
                x[0, begin + max(length, 0) : end] = torch.nan
        return x

    terms = terms._replace(k=spoiled(terms.k), v=spoiled(terms.v), g=spoiled(terms.g))
    check(got(eager, terms, call.options, do, dlse), right, 5e-6, "nan")


def most_bytes(run: Callable[[], Any]) -> int:
    """The peak of allocated bytes beyond those before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    profiler: Any = found.profiler
    events = [x for x in profiler.kineto_results.events() if x.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


FEATURES: dict[str, dict[str, Any]] = {
    "causal, by torch": {},
    "lse": {"return_lse": True},
    "window": {"window_size": 300},
    "softcap, full": {"softcap": 3.0, "causal": False},
    "gate": {"g": True},
    "packed": {"cu_seqlens": True, "sinks": torch.zeros(2)},
}


@pytest.mark.parametrize("name", FEATURES)
def test_memory_is_linear_in_length(name: str) -> None:
    def peak(T: int) -> int:
        options = dict(FEATURES[name])
        if "g" in options:
            options["g"] = -torch.rand(1, T, 2)
        if "cu_seqlens" in options:
            options["cu_seqlens"] = torch.tensor([0, T // 4, T])
        q, k, v = (torch.randn(1, T, 2, 16).requires_grad_() for _ in range(3))

        def both() -> None:
            found = attention(q, k, v, **options)
            o = found if isinstance(found, Tensor) else found[0]
            torch.autograd.grad(o.sum(), (q, k, v))

        return most_bytes(both)

    short, long = peak(1024), peak(2048)
    assert short > 0 and long < 2.2 * short, f"{short} bytes, then {long}"


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (0, 0), (2, 0), (0, 1)])
def test_keys_that_no_query_sees_are_left_out(
    left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "ROWS", 4)
    of: Any = SimpleNamespace
    block = of(q=torch.empty(1, 1, 1, 8, 1), k=torch.empty(1, 1, 11, 1), bounded=True)
    found = [(x.start, x.stop) for _, x in eager._blocks(block, of(left=left, right=right))]
    low, high = (0, 0) if left < 0 else (3 - left, 7 - left), (11, 11) if right < 0 else (7, 11)
    assert found == [(max(a, 0), min(b + max(right, 0), 11)) for a, b in zip(low, high)]


CAUSAL = AttentionOptions(0.1, right=0)


def inputs(T: int = 3) -> AttentionInputs:
    return AttentionInputs(*(torch.randn(2, T, 4, 8) for _ in range(3)))


def plan(terms: AttentionInputs, same_bits: bool = False, **asked: Any) -> Plan:
    return make_plan(terms, CAUSAL, Asked(**asked), same_bits, None)


def test_modes_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_gradients", lambda impl, terms: False)
    monkeypatch.setattr(run, "_call_of", lambda *args: run.softmax)
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(inputs(), True).modes == MODES[1:]
        assert plan(inputs(BLOCK + 1), True).modes == (run.AUTOCAST, run.OTHER_GRADIENTS)
    assert plan(inputs(), False).modes == (run.OTHER_GRADIENTS,)


def test_packed_rows_give_what_rows_give() -> None:
    terms = inputs()
    call = run.Call(terms, CAUSAL, "eager", run.softmax, Asked(lse=True), None)
    o, lse = run.softmax(terms, CAUSAL, "eager")
    got = run._through_modes(call, Plan("eager", run.softmax, (run.PACKED_ROWS,)))
    torch.testing.assert_close(got, (o, lse))


def test_plan_tells_one_tensor_of_offsets_from_two() -> None:
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    offsets, others = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 9])
    attention(q, k, v, cu_seqlens=offsets, cu_seqlens_k=offsets)
    got = attention(q, k, v, cu_seqlens=offsets, cu_seqlens_k=others)
    want = [attention(q[:, :4], k[:, :6], v[:, :6]), attention(q[:, 4:], k[:, 6:], v[:, 6:])]
    torch.testing.assert_close(got, torch.cat(want, 1))


_GIVEN = {
    "acausal": (CAUSAL._replace(right=-1), Asked()),
    "later": (CAUSAL._replace(right=2), Asked()),
    "dropout": (CAUSAL._replace(dropout=0.5), Asked()),
    "reference": (CAUSAL, Asked("reference")),
    "compiling": (CAUSAL, Asked()),
    "context": (CAUSAL, Asked()),
}


@pytest.mark.parametrize(("one", "other", "text"), FORBIDDEN, ids=lambda x: x[:20])
def test_forbidden_pair_raises(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, text: str
) -> None:
    monkeypatch.setattr(run, "is_compiling", lambda: other == "compiling")
    options, asked = _GIVEN[other]
    given = options, asked, one == "consistent", "context" in (one, other)
    with pytest.raises(NotImplementedError, match="^" + text.partition("{")[0]):
        run._expect_allowed(*given)
    if other != "compiling":
        run._expect_allowed(options, asked, False, False)


# B, T, S, H, page, width, rest
CALLS_LATENT = [(2, 1, 70, 7, 0, 40, 8), (3, 3, 96, 3, 16, 64, 32), (2, 2, 90, 5, 30, 48, 16)]


def inputs_latent(
    call: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    B, T, S, H, page, width, rest = call
    torch.manual_seed(0)
    q = torch.randn(B, T, H, width + rest, dtype=dtype)
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    latent = torch.randn(*((B * S // page, page) if page else (B, S)), width + rest, dtype=dtype)
    return q, latent, torch.tensor([S, 1, 77][:B]), table


@pytest.mark.parametrize("call", CALLS_LATENT)
def test_plain_latent_attention_matches_reference(call: tuple) -> None:
    q, latent, lengths, table = inputs_latent(call, torch.float64)
    o, lse = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
    rows = latent if table is None else latent[table.long()].flatten(1, 2)
    k = rows[:, :, None]
    terms = AttentionInputs(q, k, k[..., : call[5]], lengths=lengths)
    right_o, right_lse = softmax_reference(terms, AttentionOptions(0.2, -1, 0))
    torch.testing.assert_close(o, right_o)
    torch.testing.assert_close(lse, right_lse)


def test_latent_attention_has_gradients_in_plain_torch() -> None:
    q, latent, lengths, _ = inputs_latent((2, 2, 6, 2, 0, 5, 3), torch.float64)
    leaves = [q.requires_grad_(), latent.requires_grad_()]
    torch.autograd.gradcheck(
        lambda q, latent: latent_attention(q, latent, lengths.clamp(max=6), width=5, scale=0.3),
        leaves,
    )


@pytest.mark.parametrize("grad", [False, True])
def test_latent_attention_reads_no_missing_page(grad: bool) -> None:
    q, latent, lengths, table = inputs_latent(CALLS_LATENT[2], torch.float64)
    assert table is not None
    q.requires_grad_(grad)
    given = {"width": 48, "scale": 0.2}
    unused = table.clone()
    unused[1, 1:] = len(latent)  # sequence 1 has one key
    want = latent_attention(q, latent, lengths, table=table, **given)
    torch.testing.assert_close(
        latent_attention(q, latent, lengths, table=unused, **given), want, rtol=0, atol=0
    )
    missing = table.clone()
    missing[1] = -1
    latent[int(table[1, 0])] = torch.nan
    o = latent_attention(q, latent, lengths, table=missing, **given)
    torch.testing.assert_close(o[0], want[0], rtol=0, atol=0)
    assert not o[1].any()
    missing[0, 1] = len(latent)
    with pytest.raises(ValueError, match=r"table: want less than the 6 pages of latent, got 6"):
        latent_attention(q, latent, lengths, table=missing, **given)


@interpreted
def test_latent_kernel_interpreted() -> None:
    for call in CALLS_LATENT:
        q, latent, lengths, table = inputs_latent(call, torch.float32)
        given = {"width": call[5], "scale": 0.2, "table": table, "impl": "triton"}
        o = latent_attention(q, latent, lengths, **given)
        right, _ = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
        torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
        if table is None:
            continue
        from slipstream.kernels.attention.triton import decode_latent

        table[0, 1], table[1] = -1, len(latent)
        o, _ = decode_latent.decode(q, latent, lengths, table, call[5], 0.2)
        right, _ = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
        torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
        assert not o[1].any()


OFFSETS = torch.tensor([0, 20, 300], dtype=torch.int32)
LENGTHS = torch.tensor([300, 7], dtype=torch.int32)
ROWS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "lengths": {"lengths": LENGTHS},
    "packed": {"cu_q": OFFSETS, "cu_k": OFFSETS},
    "caches": {"cu_q": OFFSETS, "lengths": LENGTHS},
}
TERMS: dict[str, dict[str, Tensor]] = {
    "": {},
    "sinks": {"sinks": torch.zeros(4)},
    "gate": {"g": torch.zeros(2, 300, 4)},
    "slopes": {"slopes": torch.zeros(4)},
}
PROBED = {
    f"{rows} {terms}".strip(): {**ROWS[rows], **TERMS[terms]} for rows in ROWS for terms in TERMS
}


def terms_of(name: str) -> AttentionInputs:
    k = torch.zeros(2, 300, 2, 16)
    q = torch.zeros(1, 300, 4, 16) if "cu_q" in PROBED[name] else torch.zeros(2, 300, 4, 16)
    return AttentionInputs(q, k, k, **PROBED[name])


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on a device"])
@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, -1, 0)], ids=str)
@pytest.mark.parametrize("name", PROBED)
def test_mismatch_equal_results(
    name: str, options: AttentionOptions, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing differs, also where queries see no key and their log-sum-exp is -inf: kernels were
    taken for wrong there on every compiler that is not verified."""
    if not known:  # plain torch's way on a GPU
        monkeypatch.setattr(eager, "by_sequence", lambda terms: False)

    def plain(terms: AttentionInputs, options: AttentionOptions, *impls: str) -> tuple:
        return op.softmax(terms, options, "eager")

    assert probe.mismatch(terms_of(name), options, "triton", plain, "triton") is None


@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, -1, 0)], ids=str)
@pytest.mark.parametrize("name", PROBED)
def test_mismatch_wrong_results(name: str, options: AttentionOptions) -> None:
    def wrong(terms: AttentionInputs, options: AttentionOptions, *impls: str) -> tuple:
        o, lse = op.softmax(terms, options, "eager")
        return (o, lse) if impls[0] == "eager" else (1.2 * o, lse)

    said = probe.mismatch(terms_of(name), options, "triton", wrong, "triton")
    assert said is not None and "output 0 is off by 2.0e-01" in said


@pytest.mark.parametrize("name", PROBED)
def test_probes_heads_are_one_of_keys_and_its_queries(name: str) -> None:
    fresh = probe.like(terms_of(name))
    assert (fresh.q.shape[2], fresh.k.shape[2], fresh.v.shape[2]) == (2, 1, 1)
    assert all(x is None or x.shape[-1] == 2 for x in (fresh.g, fresh.sinks, fresh.slopes))
    if "cu_q" not in PROBED[name]:
        q, k, v = terms_of(name)[:3]
        seen = []

        def decode(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            seen.append((q.shape[2], k.shape[2]))
            return q, q.sum(-1)

        assert probe.mismatch_of_cache(Cache(q, k, v), AttentionOptions(0.1), decode) is None
        assert {*seen} == {(2, 1)}


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, -torch.inf], [1.0, -torch.inf], 0.0),
        ([1.5, -torch.inf], [1.0, -torch.inf], 0.5),
        ([1.0, torch.inf], [1.0, -torch.inf], torch.nan),
        ([1.0, 0.0], [1.0, -torch.inf], torch.nan),
        ([torch.nan, 1.0], [1.0, 1.0], torch.nan),
    ],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    found = torch.tensor(kernel_pair.relative_error(*map(torch.tensor, (got, want))))
    wanted: Tensor = torch.tensor(error)
    if wanted.isnan():
        assert not found <= 1e9  # no bar admits it
    else:
        torch.testing.assert_close(found, wanted)

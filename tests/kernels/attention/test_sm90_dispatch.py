"""Which calls the sm_90 attention kernels take, and what they say of those that they refuse."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compiler import compiler_state
from slipstream.kernels.attention import dispatch as call
from slipstream.kernels.attention import plan, run
from slipstream.kernels.attention.inputs import Asked, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.plan import kind
from slipstream.runtime import backends, guarded_launch
from slipstream.runtime.dispatch import ValidationCache

PLAIN = AttentionOptions(0.1)
WIDTHS = "one width of 64, 128, 256, 192 and 128, 512 and 512"


def terms(
    D: int = 128, DV: int = 0, dtype: torch.dtype = torch.bfloat16, **rest: Any
) -> AttentionInputs:
    made = (torch.zeros(1, 4, 2, x, dtype=dtype) for x in (D, D, DV or D))
    return AttentionInputs(*made)._replace(**rest)


@pytest.fixture
def on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.backends, "sm90_unsupported", lambda x: None)


@pytest.mark.usefixtures("on_sm_90")
@pytest.mark.parametrize(
    ("call", "options"),
    [
        (terms(64), PLAIN),
        (terms(dtype=torch.float16), PLAIN),
        (terms(256), AttentionOptions(0.1, left=7, right=0, softcap=5.0)),
        (terms(192, 128), PLAIN),
        (terms(512), PLAIN),
        (terms(sinks=torch.zeros(2), lengths=torch.tensor([3])), PLAIN),
    ],
    ids=["64", "fp16", "windows and a cap", "latent", "wide", "sinks and lengths"],
)
def test_hopper_takes(call: AttentionInputs, options: AttentionOptions) -> None:
    assert plan.sm90_unsupported_reason(call, options) is None


@pytest.mark.usefixtures("on_sm_90")
@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (terms(dtype=torch.float32), PLAIN, "and q is torch.float32"),
        (terms(k=torch.zeros(1, 4, 2, 128)), PLAIN, "q, k and v differ in dtype"),
        (terms(v=torch.zeros(1, 4, 2, 128).half()), PLAIN, "q, k and v differ in dtype"),
        (terms(72), PLAIN, WIDTHS),
        (terms(192), PLAIN, WIDTHS),
        (terms(128, 64), PLAIN, WIDTHS),
        (terms(128, 192), PLAIN, WIDTHS),
        (terms(g=torch.zeros(1, 4, 2)), AttentionOptions(0.1, right=0), "it takes no g"),
        (terms(slopes=torch.zeros(2)), PLAIN, "it takes no slopes"),
        (terms(), AttentionOptions(0.0), "the scale is to be positive"),
        (terms(), AttentionOptions(-0.1), "the scale is to be positive"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_hopper_says_why_it_refuses(
    call: AttentionInputs, options: AttentionOptions, words: str
) -> None:
    assert words in (plan.sm90_unsupported_reason(call, options) or "")


@pytest.mark.usefixtures("on_sm_90")
def test_mixed_width_gradients_take_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[tuple[Any, ...]] = []

    def noted(
        terms: AttentionInputs, options: AttentionOptions, impls: str, backward_impls: str = ""
    ) -> tuple[Any, Any]:
        ways.append((impls, backward_impls))
        return terms.v, terms.v

    monkeypatch.setattr(call.backends, "INTERPRETED", True)  # so that it asks, on a CPU too
    monkeypatch.setattr(call, "unsupported_reason", lambda qkv: None)
    monkeypatch.setattr(call.guarded_launch, "known_failure", lambda kind, device: None)
    monkeypatch.setattr(run, "softmax", noted)
    monkeypatch.setattr(run, "_PLANS", ValidationCache())
    for given in (terms(192, 128), terms(128)):
        run.run(given, PLAIN, Asked(lse=True))
        given.q.requires_grad_()
        run.run(given, PLAIN, Asked(lse=True))
    every = "sm90|triton|eager"
    assert ways == [(every, ""), (every, "triton|eager"), (every, ""), (every, "")]
    reason = "its gradients want heads of q and v of one width, of at most 256"
    found = call.choose(call.OF_GRADIENTS, (terms(192, 128), PLAIN), None)
    assert found.impl == "triton" and found.rejected == (("sm90", reason),)
    wanted = terms(192, 128)
    wanted.q.requires_grad_()
    with pytest.raises(NotImplementedError, match=reason):
        run.run(wanted, PLAIN, Asked("sm90"))


@pytest.mark.usefixtures("on_sm_90")
def test_hopper_refuses_what_was_found_to_fail_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the same kind alone: another width, or the portable kernels, may do."""
    here = compiler_state.CompilerState("sm_90", "3.6.0", "1.2.3", passive=True, remembers=False)
    here._reasons[kind(terms(), PLAIN, "sm90")] = "killed by SIGABRT"
    here.unguarded = False
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: here)
    assert plan.sm90_unsupported_reason(terms(), PLAIN) == "killed by SIGABRT"
    assert plan.sm90_unsupported_reason(terms(64), PLAIN) is None
    assert here.unusable(kind(terms(), PLAIN)) is None


@pytest.mark.parametrize(
    ("kind_of_device", "capability", "release", "words"),
    [
        ("cpu", (9, 0), (3, 6), "the tensors are on cpu"),
        ("cuda", (8, 0), (3, 6), "written for sm_90"),
        ("cuda", (10, 0), (3, 6), "written for sm_90"),
        ("cuda", (9, 0), (3, 5), "not that of Triton 3.5"),
        ("cuda", (9, 0), (3, 10), "not that of Triton 3.10"),
        ("cuda", (9, 0), (3, 7), "and q is torch.float64"),
        ("cuda", (9, 0), (3, 9), "and q is torch.float64"),
    ],
)
def test_hopper_says_what_it_wants_of_the_machine(
    kind_of_device: str,
    capability: tuple[int, int],
    release: tuple[int, int],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "HAVE_TRITON", True)
    monkeypatch.setattr(backends, "INTERPRETED", False)
    monkeypatch.setattr(backends, "RELEASE", release)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = SimpleNamespace(type=kind_of_device)
    q: Any = SimpleNamespace(
        is_cuda=kind_of_device == "cuda", device=device, dtype=torch.float64, shape=(1, 4, 2, 128)
    )
    backends._warn.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert words in (plan.sm90_unsupported_reason(AttentionInputs(q, q, q), PLAIN) or "")
    # of a release without them, once: the GPU could run these kernels
    assert [words in str(x.message) for x in said] == [True] * ("of Triton" in words)


def test_pairs_at_work() -> None:
    from slipstream.kernels.attention.sm90.launch import pairs_at_work

    def found(T: int, causal: bool, pairs: int = 64, processors: int = 132) -> int:
        return pairs_at_work(pairs, T * 4 * 128 * 2, causal, processors)

    assert [found(T, False) for T in (2048, 4096, 8192, 16384)] == [16, 8, 4, 3]
    assert [found(T, True) for T in (2048, 4096, 16384)] == [48, 26, 26]
    # as few as there are, and at least one of a device with few processors
    assert found(4096, True, pairs=3) == 3
    assert found(1 << 20, False, processors=8) == 1


def test_pairs_of_a_forward_fit() -> None:
    """Keys and values of the heads at work take a part of the L2 cache; heads of a group share."""
    from slipstream.kernels.attention.sm90.launch import _section

    def found(T: int, H: int, HKV: int, causal: bool) -> int:
        q, k = (torch.empty(1, T, n, 128, dtype=torch.float16, device="meta") for n in (H, HKV))
        return _section(AttentionInputs(q, k, k), PLAIN._replace(right=0 if causal else -1))

    # those of one head are 2 MB
    assert [found(4096, 8, n, False) for n in (8, 4, 2)] == [4, 8, 16]
    assert [found(8192, 8, n, True) for n in (8, 2)] == [2, 8]
    # one at least, and two where they differ in work
    assert [found(1 << 16, 8, 8, x) for x in (False, True)] == [1, 2]


@pytest.mark.parametrize(("tiles", "pairs", "column_tiles", "group"), [
    (32, 64, 32, 1), (256, 16, 256, 1), (3, 1, 2, 8), (1024, 2, 1024, 4),
])  # fmt: skip
def test_wide_gradients_stay_within_their_workspace(
    tiles: int, pairs: int, column_tiles: int, group: int
) -> None:
    wide_launch = pytest.importorskip("slipstream.kernels.attention.triton.wide_launch")
    tile = plan.tiles.WIDE["sm_90", 2]
    rows, count = wide_launch.fit(tiles, pairs, column_tiles, group, tile, 2)
    assert 1 <= rows <= tiles and 1 <= count <= pairs and (count == 1 or rows == tiles)
    each = 2 * 2 * group * tile.BM * column_tiles * tile.BN

    def fits(rows: int, count: int) -> bool:
        return rows * count * each <= plan.tiles.WORKSPACE_BYTES

    assert fits(rows, count) or (rows, count) == (1, 1)
    # as much as fits
    assert rows == tiles or not fits(rows + 1, 1)
    assert count == pairs or not fits(rows, count + 1)


@pytest.mark.parametrize("widths", [(512, 512), (64, 512), (512, 64)])
def test_triton_takes_heads_up_to_its_limit(widths: tuple[int, int]) -> None:
    q, v = (torch.zeros(1, 4, 2, x) for x in widths)
    assert plan.MAX_HEAD_DIM == 512 and plan._too_wide(q, v) is None
    assert "at most 512" in (plan._too_wide(q, torch.zeros(1, 4, 2, 513)) or "")


def test_tma_reads_heads_where_they_lie() -> None:
    """Whole tensors, parts of a projection, and heads one after another: no copy."""
    from slipstream.kernels.attention.sm90.launch import _is_tma_readable

    x = torch.empty(2, 8, 6, 64, dtype=torch.bfloat16)
    for part in (x, x[:, :, :2], x[:, :, 2:], x[:1, :1], x.transpose(1, 2)):
        assert _is_tma_readable(part), part.stride()
    for part in (x[..., 1:], x[..., ::2], x[:, :, ::5].transpose(2, 3), x[:, :1, ::2]):
        assert not _is_tma_readable(part), part.stride()


def test_units_come_with_places_by_two_flags() -> None:
    forward = pytest.importorskip("slipstream.kernels.attention.sm90.forward")
    flag = forward.common.FLAG
    dynamic, packed = (int(getattr(x, "value", x)) for x in (flag.DYNAMIC, flag.PACKED_Q))
    every = range(256)
    assert [x for x in every if forward.hands_out_places(x)] == [
        x for x in every if x & dynamic and x & packed
    ]
    assert {forward.unit_scalars(x) for x in (dynamic, packed)} == {1}
    assert forward.unit_scalars(dynamic | packed) == 1 + len(forward.common.TileLocation._fields)

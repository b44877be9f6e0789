"""Context parallelism: operators whose tokens are divided among processes equal one process."""

import itertools
import random
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.models.config import MIXERS
from slipstream.parallel import ContextParallel, shard, unshard
from slipstream.runtime.context_parallel import Share
from slipstream.tools.catalog import Sample, flat
from tests.support import context_runs, wants
from tests.support.context_runs import CALLS, CUTS, MODEL_CUTS, RANKS, SHORT_CUTS, Cut, compare_all
from tests.support.language_models import INDEXED
from tests.support.operators import Size, packed
from tests.support.processes import in_processes, own_group

pytestmark = wants.collectives


def some_cut(seed: int) -> Cut:
    draw = random.Random(seed)
    sequences = tuple(draw.choice((0, 1, 5, 17, 40)) for _ in range(draw.randint(1, 6)))
    at = sorted(draw.randint(0, sum(sequences)) for _ in range(RANKS - 1))
    ends = (0, *at, sum(sequences))
    return Cut(f"drawn {seed}", tuple(b - a for a, b in itertools.pairwise(ends)), sequences)


def cuts_of(op: Sample, thorough: bool) -> list[Cut]:
    """Token by token only the recurrence is another. A sample: of an operator's first row packed,
    and of every row the others in turn."""
    if op.op.startswith("fused"):
        return [CUTS[2]]
    others = [x for x in CUTS if x is not CUTS[2]]
    by_chunks = [x for x in CALLS if not x.op.startswith("fused")]
    turn = [x.name for x in by_chunks].index(op.name) % len(others)
    first = next(x for x in by_chunks if x.op == op.op) is op
    return list(CUTS) if thorough else [*[CUTS[2]] * first, others[turn]]


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operators_across_ranks_equal_one_rank(thorough: bool, tmp_path: Path) -> None:
    """Results, states and gradients of everything, in float64."""
    cases = [(x.name, cut, "mixed") for x in CALLS for cut in cuts_of(x, thorough)]
    names = [x.name for x in CALLS]
    drawn = range(len(names) if thorough else len(names) // 3)
    cases += [(names[3 * i % len(names)], some_cut(i), "mixed") for i in drawn]
    # what reads tokens of the ranks before, not a state alone
    reads = ("short_convolution", "token_shift", "attention")
    short = [x.name for x in CALLS if thorough or x.op in reads]
    cases += [(name, cut, "mixed") for name in short for cut in SHORT_CUTS]
    assert len({name for name, _, _ in cases}) == len(CALLS) > 25
    assert in_processes(RANKS, tmp_path, compare_all, cases) == []


def test_every_chunk_operator_takes_a_context() -> None:
    takes = {x.op for x in CALLS}
    wanted = {n for n in vars(ops) if n.startswith("chunk_")}
    assert takes >= wanted | {"short_convolution", "token_shift", "attention", "selective_scan"}


def test_reversed_time_v_first_states_and_bfloat16(tmp_path: Path) -> None:
    assert in_processes(RANKS, tmp_path, context_runs.mixed_options) == []


def test_replayed_calls_exchange_too(tmp_path: Path) -> None:
    """Also where one rank compiles kernels, which exchanges nothing."""
    assert in_processes(RANKS, tmp_path, context_runs.replayed) == []


def test_attention_lse_and_slopes(tmp_path: Path) -> None:
    assert in_processes(RANKS, tmp_path, context_runs.attention_lse) == []


def test_deterministic_mode_equals_one_rank(tmp_path: Path) -> None:
    assert in_processes(RANKS, tmp_path, context_runs.deterministic) == []


def test_bytes_exchanged_do_not_depend_on_the_tokens(tmp_path: Path) -> None:
    found = dict(in_processes(RANKS, tmp_path, context_runs.bytes_exchanged))
    assert found and all(few == many > 0 for few, many in found.values()), found


def test_attention_holds_some_heads_of_other_ranks(tmp_path: Path) -> None:
    shares = in_processes(2, tmp_path, context_runs.attention_bytes)
    assert len(shares) == 2
    for forward, both in shares:
        assert 0.5 < forward <= 0.6 and 0.45 < both <= 0.5


def test_model_across_ranks_equals_one_rank(tmp_path: Path) -> None:
    """Loss and gradients of every mixer, packed and in rows."""
    mixers = [x for x in MIXERS if x not in INDEXED]
    assert in_processes(RANKS, tmp_path, context_runs.compare_models, mixers, MODEL_CUTS) == []


def test_shares_partition_every_batch() -> None:
    """Pieces of all ranks, put together, are the sequences."""
    for seed in range(200):
        cut = some_cut(seed)
        assert cut.sequences is not None
        offsets = (0, *torch.tensor(cut.sequences).cumsum(0).tolist())
        tokens = [0] * len(cut.sequences)
        for rank in range(RANKS):
            share = Share(rank, cut.lengths, offsets)
            for i, n in enumerate(share.pieces):
                here = share.local_offsets[i + 1] - share.local_offsets[i]
                assert here > 0
                assert share.begins_here(i) == (tokens[n] == 0)
                tokens[n] += here
                assert share.ends_here(i) == (tokens[n] == cut.sequences[n])
            assert share.reversed().reversed().local_offsets == share.local_offsets
        assert tokens == list(cut.sequences)


def test_crossings_are_of_sequences_that_go_on() -> None:
    """Of any rank; a sequence that ends where a rank does crosses nothing."""
    for offsets, most in (((0, 4, 8, 12), 0), ((0, 3, 8, 12), 1), ((0, 1, 12), 2)):
        assert Share(0, (4, 4, 4), offsets).crossings == (most > 0, most)


def test_shares_differ_by_each_argument() -> None:
    """Calls that are remembered by them are played for no others."""
    given: dict[str, Any] = {
        "rank": 1, "lengths": (4, 4), "offsets": (0, 3, 8), "group": None, "backwards": False,
        "segment_tokens": None,
    }  # fmt: skip
    others: dict[str, Any] = {
        "rank": 0, "lengths": (3, 5), "offsets": (0, 4, 8), "backwards": True, "segment_tokens": 4,
        "group": SimpleNamespace(group_name="other"),
    }  # fmt: skip
    assert given.keys() == others.keys() == signature(Share).parameters.keys()
    found = {Share(**given), *(Share(**{**given, key: x}) for key, x in others.items())}
    assert len(found) == 1 + len(others) and Share(**given) in found


@own_group()
def test_shard_and_unshard() -> None:
    x = torch.randn(2, 6, 3, requires_grad=True)
    plan = ContextParallel()
    mine = shard({"x": x}, plan)["x"]
    whole = unshard(mine, plan)
    torch.testing.assert_close(whole, x)
    whole.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(unshard(shard(ids, plan), plan), ids)
    for call in (shard, unshard):
        with pytest.raises(ValueError, match=r"want \[B, T, \.\.\.\], got shape \(6,\)"):
            call(ids[0], plan)


# torch's own: Dynamo looks at .grad of what goes into a graph after a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@own_group()
def test_context_under_torch_compile() -> None:
    """The graph breaks there, and the numbers and gradients are the same."""
    plan = ContextParallel(None, [0, 4, 10])
    q, weight = torch.randn(1, 10, 2, 16, requires_grad=True), torch.randn(32, 3)

    def layer(q: torch.Tensor) -> torch.Tensor:
        x, _ = ops.short_convolution(q.flatten(2) * 2, weight, context=plan)
        x, _ = ops.token_shift(x, context=plan)
        x = x.view_as(q)
        o, _ = ops.chunk_retention(x, x, x, context=plan)
        h, _ = ops.chunk_hgrn(o.flatten(2), -o.flatten(2).abs(), context=plan)
        return ops.attention(x, h.view_as(q), o + 1, context=plan)

    want = layer(q)
    (grad,) = torch.autograd.grad(want.square().sum(), q)
    torch.compiler.reset()
    got = torch.compile(layer, backend="aot_eager")(q)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), q)[0], grad)


@own_group()
@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.name)
def test_calls_leave_a_graph_with_every_argument(
    op: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torch.compile, which calls a context's `eagerly`."""
    args = op.inputs(packed(Size(), 3, 9))
    plan = ContextParallel(None, args.pop("cu_seqlens"))
    want, left = flat(op(args, context=plan)), []

    def eagerly(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        left.append(function)
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
        return function(*given, **options)

    plan.eagerly = eagerly
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    torch.testing.assert_close(flat(op(args, context=plan)), want)
    assert left


@own_group()
def test_zigzag_is_refused_with_its_reason() -> None:
    with pytest.raises(NotImplementedError, match="layout: is not implemented with 'zigzag'; rec"):
        ContextParallel(layout="zigzag")


@own_group()
def test_wrong_plans_and_arguments_are_named() -> None:
    q, plan = torch.randn(1, 6, 2, 16), ContextParallel(None, [0, 2, 6])
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    assert ContextParallel(None, None, None, 1).segment_tokens == 1
    wrong: dict[str, Callable[[], Any]] = {
        "group: want a ProcessGroup": lambda: ContextParallel("all"),
        "cu_seqlens: want offsets from 0": lambda: ContextParallel(None, [0, 5, 3]),
        "lengths: want 1 numbers": lambda: ContextParallel(None, None, [3, 3]),
        "layout: want 'contiguous', got 'ring'": lambda: ContextParallel(layout="ring"),
        "segment_tokens: want at least 1": lambda: ContextParallel(None, None, None, 0),
        "lengths: want 6 tokens in all": lambda: ContextParallel(None, [0, 6], [5]),
        "context: rank 0 has 6 tokens, got 5": lambda: ops.chunk_linear_attn(
            q[:, 1:], q[:, 1:], q[:, 1:], normalize=False, context=plan
        ),
        "cu_seqlens: want None with a context": lambda: ops.chunk_retention(
            q, q, q, cu_seqlens=offsets, context=plan
        ),
        "impl: the reference runs": lambda: ops.chunk_retention(
            q, q, q, context=plan, impl="reference"
        ),
        "initial_state: want shape": lambda: ops.chunk_retention(
            q, q, q, initial_state=torch.zeros(1, 2, 16, 16), context=plan
        ),
        "key_lengths: want None with a context": lambda: ops.attention(
            q, q, q, key_lengths=offsets[1:], context=plan
        ),
        "dropout_p: want 0 with a context": lambda: ops.attention(
            q, q, q, dropout_p=0.5, context=plan
        ),
        "window_size: want no later keys with a context": lambda: ops.attention(
            q, q, q, causal=False, window_size=3, context=plan
        ),
        "beta: want one value for each token and head with a context": lambda: (
            ops.fused_recurrent_delta_rule(q, q, q, q.sigmoid(), context=plan)
        ),
        "batch: want": lambda: shard(torch.zeros(3), plan),
        "batch: want batch size 1": lambda: shard(torch.zeros(2, 6), plan),
        "cu_seqlens: want offsets, got": lambda: ContextParallel(None, offsets.to("meta")),
        "context: want 6 tokens in all": lambda: shard(torch.zeros(1, 7), plan),
    }
    for text, call in wrong.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^{text}"):
            call()


@own_group()
@pytest.mark.parametrize("given", ["x", 3, ["a"], [1.5], [None], 2.5])
def test_plans_of_no_integers_are_named(given: Any) -> None:
    for name in ("cu_seqlens", "lengths"):
        with pytest.raises(TypeError, match=rf"^{name}: want a sequence of integers"):
            ContextParallel(**{name: given})
    for call in (shard, unshard):
        with pytest.raises(TypeError, match=r"^context: want a ContextParallel"):
            call(torch.zeros(1, 6), given)

"""Prefix trees: every operator with `parents` computes what it does for each path by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream import ops
from slipstream.ops import PrefixTree, _attention_trees
from slipstream.runtime import tree_keys
from slipstream.runtime.prefix_tree import Rows
from slipstream.runtime.tree_blocks import each
from slipstream.runtime.trees import tree_of
from slipstream.tools.catalog import OPERATORS, Sample, flat
from slipstream.tools.samples import Shape
from tests.support.prefix_trees import LENGTHS, PARENTS, offsets, path_of, root_of

SHAPE = Shape(B=1, H=2, K=8, V=4, M=4, D=8, lengths=LENGTHS, state=True, dtype=torch.float64)
_ALIBI = "q=BTGK k=BTHK v=BTHV alibi_slopes=G:beta"
SAMPLES = [
    *(x for x in OPERATORS if "parents" in x.takes and not any("S" in y for y in x.dims.values())),
    *(
        Sample("attention", "q=BTGK k=BTHK v=BTHV", options=options, variant=str(i))
        for i, options in enumerate([{"window_size": 4}, {"softcap": 3.0}])
    ),
    Sample("attention", "q=BTGK k=BTHK v=BTHV sinks=G", variant="sinks"),
    Sample("attention", _ALIBI, variant="alibi", fixed="alibi_slopes"),
]
SAMPLES = [x for x in SAMPLES if not x.random and x.options.get("causal", True)]
SAMPLES = [x for x in SAMPLES if "selected" not in x.dims]
ATTENTION = [x for x in SAMPLES if x.op == "attention"]


def picked(sample: Sample, args: dict[str, Any], n: int) -> dict[str, Any]:
    """The arguments of one path, which is then a row by itself."""
    index, found = torch.tensor(path_of(n), dtype=torch.int64), dict(args)
    found.pop("cu_seqlens", None)
    for name, letters in sample.dims.items():
        if letters[1:2] == "T":
            found[name] = args[name][:, index]
        elif letters[1:2] == "R":
            found[name] = args[name][:, torch.stack([2 * index, 2 * index + 1], 1).flatten()]
    states, root = args.get("initial_state"), root_of(n)
    if states is not None:
        found["initial_state"] = each(lambda x: x[root : root + 1], states)
    return found


def by_paths(sample: Sample, args: dict[str, Any], **more: Any) -> list[Tensor]:
    rows, finals = [], []
    for n, length in enumerate(LENGTHS):
        o, *final = flat(sample(picked(sample, args, n), **more))
        rows.append(o[:, o.shape[1] - length :])
        finals.append(final)
    return [torch.cat(rows, 1), *(torch.cat(x) for x in zip(*finals))]


def made(sample: Sample, gradients: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    args = sample.inputs(SHAPE)
    for name, given in args.items():
        for x in flat(given):
            x.requires_grad_(gradients and x.is_floating_point() and name not in sample.fixed)
    args["cu_seqlens"] = offsets()
    return args


def gradients_of(results: list[Tensor], args: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    loss = torch.stack([(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in results]).sum()
    inputs = [x for x in flat(tuple(args.values())) if x.requires_grad]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(inputs, found)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda x: x.name)
def test_tree_equals_its_paths(sample: Sample) -> None:
    args = made(sample)
    results = flat(sample(args, parents=torch.tensor(PARENTS)))
    wanted = by_paths(sample, args)
    assert len(results) == len(wanted)
    for x, y in zip(results, wanted):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-9)
    for x, y in zip(gradients_of(results, args), gradients_of(wanted, args)):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("sample", ATTENTION, ids=lambda x: x.name)
def test_attention_joins_the_sums_of_ancestors(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes are long; the keys of these would be copied."""
    assert tree_keys.copies_paths(tree())
    long = PrefixTree([0, 40, 43, 46], [-1, 0, 0])
    assert not tree_keys.copies_paths(long)
    monkeypatch.setattr(_attention_trees, "copies_paths", lambda tree: False)
    test_tree_equals_its_paths(sample)


def test_every_operator_of_packed_rows_takes_trees() -> None:
    packed = {x.op for x in OPERATORS if "cu_seqlens" in x.takes}
    packed -= {"recurrent_step"}  # of decoding
    packed -= {"index", "index_loss"}  # which select keys of a sequence
    assert packed == {x.op for x in SAMPLES}


def tree() -> PrefixTree:
    return PrefixTree(offsets(), PARENTS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda x: x.name)
def test_plan_serves_as_context_and_gives_equal_bits(sample: Sample) -> None:
    args = made(sample)
    results = flat(sample(args, parents=torch.tensor(PARENTS)))
    del args["cu_seqlens"]
    again = flat(sample(args, context=tree()))
    pairs = zip([*results, *gradients_of(results, args)], [*again, *gradients_of(again, args)])
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ([-1, 1, 0], "node 1, got 1"),  # a cycle of one
        ([2, -1, 1], "node 0, got 2"),  # a parent after its child
        ([-1, 0, -2], "node 2, got -2"),
        ([-1, 0, 7], "node 2, got 7"),
        ([-1, 0], "want 3 numbers"),
    ],
)
def test_bad_trees_name_the_node(parents: list[int], text: str) -> None:
    x = torch.randn(1, 6, 4)
    given: Any = {"cu_seqlens": torch.tensor([0, 2, 4, 6]), "parents": torch.tensor(parents)}
    with pytest.raises(ValueError, match=text):
        ops.token_shift(x, **given)
    with pytest.raises(ValueError, match=text):
        ops.chunk_hgrn(x, -x.abs(), **given)
    with pytest.raises(ValueError, match=text):
        ops.packed_positions(given["cu_seqlens"], 6, parents=given["parents"])


def test_trees_refuse_other_options() -> None:
    x, cu, parents = torch.randn(1, 6, 4), torch.tensor([0, 4, 6]), torch.tensor([-1, 0])
    q = torch.randn(1, 6, 2, 4)
    with pytest.raises(ValueError, match="parents: want cu_seqlens"):
        ops.token_shift(x, parents=parents)
    with pytest.raises(ValueError, match="5 tokens"):
        ops.chunk_hgrn(x[:, :5], -x[:, :5].abs(), cu_seqlens=cu, parents=parents)
    with pytest.raises(ValueError, match="5 tokens"):
        ops.attention(q[:, :5], q[:, :5], q[:, :5], cu_seqlens=cu, parents=parents)
    with pytest.raises(NotImplementedError, match="reverse: not with parents"):
        ops.chunk_hgrn(x, -x.abs(), cu_seqlens=cu, parents=parents, reverse=True)
    with pytest.raises(NotImplementedError, match="parents: want causal"):
        ops.attention(q, q, q, causal=False, cu_seqlens=cu, parents=parents)
    with pytest.raises(ValueError, match="key_lengths: want None"):
        ops.attention(q, q, q, key_lengths=torch.tensor([4, 2]), cu_seqlens=cu, parents=parents)
    with pytest.raises(NotImplementedError, match="parents: not with a context"):
        ops.token_shift(x, parents=parents, cu_seqlens=cu, context=tree())
    with pytest.raises(TypeError, match="parents: want int32 or int64"):
        ops.token_shift(x, parents=parents.float(), cu_seqlens=cu)
    with pytest.raises(TypeError, match="parents: want a sequence of integers"):
        ops.PrefixTree([0, 4, 6], [-1, 0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="initial_state"):
        ops.chunk_hgrn(x, -x.abs(), initial_state=x[:, 0], cu_seqlens=cu, parents=parents)


def test_states_that_no_root_has_are_not_read() -> None:
    args = made(next(x for x in SAMPLES if x.op == "chunk_gla"), gradients=False)
    short = made(next(x for x in SAMPLES if x.op == "short_convolution"), gradients=False)
    for op, given in ((ops.chunk_gla, args), (ops.short_convolution, short)):
        wanted = op(**given, parents=torch.tensor(PARENTS))[0]
        rows = [n for n, parent in enumerate(PARENTS) if parent >= 0]
        given["initial_state"] = given["initial_state"].index_fill(0, torch.tensor(rows), torch.nan)
        assert torch.equal(op(**given, parents=torch.tensor(PARENTS))[0], wanted)


def test_positions_go_on_from_the_parents_end() -> None:
    parents, cu = torch.tensor(PARENTS), offsets()
    wanted = [len(path_of(n)) - m + i for n, m in enumerate(LENGTHS) for i in range(m)]
    assert ops.packed_positions(cu, sum(LENGTHS), parents=parents)[0].tolist() == wanted
    moved = [x + root_of(n) for n, m in enumerate(LENGTHS) for x in [0] * m]
    found = ops.packed_positions(cu, sum(LENGTHS), parents=parents, offsets=torch.arange(12))[0]
    assert found.tolist() == [x + y for x, y in zip(wanted, moved)]


def test_plan_is_made_once_for_unchanged_tensors() -> None:
    cu, parents = offsets(), torch.tensor(PARENTS)
    made = tree_of(cu, parents)
    assert tree_of(cu, parents) is made
    parents[1] = -1
    assert tree_of(cu, parents).parents[1] == -1
    cu[-1] += 1
    assert [tree_of(x, parents).tokens for x in (cu, cu + (cu == cu[-1]))] == [27, 28]


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_gla"])
def test_modes_of_calls_go_with_trees(name: str) -> None:
    """V-first states and autocast."""
    sample = next(x for x in SAMPLES if x.name == name)
    args, parents = made(sample), torch.tensor(PARENTS)
    o, state = sample(args, parents=parents)
    wanted = gradients_of([o, state], args)
    first = args | {"initial_state": args["initial_state"].mT}
    other, after = sample(first, parents=parents, state_v_first=True)
    torch.testing.assert_close(other, o)
    torch.testing.assert_close(after.mT, state)
    for x, y in zip(gradients_of([other, after.mT], args), wanted):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        assert torch.equal(sample(args, parents=parents, state_v_first=False)[1], state)
    single = {n: x.detach().float() if x.is_floating_point() else x for n, x in args.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = sample(single, parents=parents)[0]
    assert y.dtype == torch.bfloat16
    assert float((y - o).detach().abs().max()) < 0.05


def test_gradients_of_states_alone_reach_the_ancestors() -> None:
    sample = next(x for x in SAMPLES if x.name == "chunk_gated_delta_rule")
    args = made(sample)
    results = [sample(args, parents=torch.tensor(PARENTS))[1], by_paths(sample, args)[1]]
    found, wanted = (gradients_of([x], args) for x in results)
    assert float(wanted[1].abs().max()) > 0
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-8)


CONSISTENT = [x for x in SAMPLES if "consistent" in x.takes and not x.variant]


@pytest.mark.parametrize("lengths", [(64, 64, 70, 30, 40), (5, 0, 130, 70, 100), (66, 62, 1, 3, 0)])
@pytest.mark.parametrize("sample", CONSISTENT, ids=lambda x: x.name)
def test_consistent_branch_has_the_bits_of_its_row(
    sample: Sample, lengths: tuple[int, ...]
) -> None:
    parents = torch.tensor([-1, 0, 0, 1, -1])
    torch.manual_seed(0)
    args = sample.inputs(Shape(B=1, H=2, K=8, V=8, lengths=lengths, dtype=torch.float32))
    o = flat(sample(args, parents=parents, consistent=True))[0]
    cu = args.pop("cu_seqlens").tolist()
    for n, path in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [4])):
        index = torch.tensor([t for m in path for t in range(cu[m], cu[m + 1])]).long()
        row = {k: x[:, index] if sample.dims[k][1:2] == "T" else x for k, x in args.items()}
        alone = flat(sample(row, consistent=True))[0]
        assert torch.equal(o[:, cu[n] : cu[n + 1]], alone[:, alone.shape[1] - lengths[n] :])


def test_depths_copy_no_tokens_and_save_states_once() -> None:
    parents, lengths = [-1, -1, 1, 0, 1, 0, 3, 2, 2], (2, 3, 1, 4, 2, 2, 3, 1, 1)
    assert PrefixTree([0, *torch.tensor(lengths).cumsum(0).tolist()], parents).to_levels is None
    args = next(x for x in SAMPLES if x.name == "chunk_simple_gla").inputs(
        Shape(B=1, H=2, K=8, V=4, lengths=lengths, dtype=torch.float64)
    )
    saved: list[torch.Size] = []
    pack = lambda x: saved.append(x.shape) or x.clone()  # noqa: E731
    q = args.pop("q").requires_grad_() * 2
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = ops.chunk_simple_gla(q, **args, parents=torch.tensor(parents))[0]
    memory = StorageWeakRef(q.untyped_storage())
    del q
    assert memory.expired()  # hooks, such as of nn/recompute.py, say what stays
    o.sum().backward()
    states = [x[0] for x in saved if x[1:] == (2, 8, 4) and x[0] < 9]
    assert states == [2, 4]  # of the roots and their children, not of the nodes that start there


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("index", [[0, 0, 1, 0, 2, 2, 0, 4], [3, -1, 3, 0, 4], [2, 0, 1], [-1, -1]])
def test_gradients_of_copied_rows_are_sums(index: list[int], size: int) -> None:
    rows, grad = Rows(torch.tensor(index)), torch.randn(len(index), 99)
    there = torch.tensor(index) >= 0
    wanted = torch.zeros(size, 99).index_add_(0, torch.tensor(index)[there], grad[there])
    assert torch.equal(rows.returned(grad, size), wanted)  # in the order of the copies


RECURRENT = [x for x in CONSISTENT if x.op != "attention"]


@pytest.mark.parametrize("sample", RECURRENT, ids=lambda x: x.name)
def test_consistent_trees_have_the_gradients_of_others(sample: Sample) -> None:
    """Nodes are laid out in blocks of 64 tokens, some of which are there twice."""
    parents, lengths = torch.tensor([-1, 0, 1, 1, -1, 4, 4, 2]), (0, 70, 3, 64, 5, 0, 60, 61)
    torch.manual_seed(0)
    shape = Shape(B=1, H=1, K=4, V=4, lengths=lengths, state=True, dtype=torch.float64)
    args = sample.inputs(shape)
    for x in flat(tuple(args.values())):
        x.requires_grad_(x.is_floating_point())
    found = [flat(sample(args, parents=parents, consistent=on)) for on in (True, False)]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-9)
    for x, y in zip(*(gradients_of(x, args) for x in found), strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-8)


def test_empty_trees() -> None:
    for lengths, parents in (([], []), ([0], [-1]), ([0, 0], [-1, 0])):
        cu, given = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents, dtype=torch.int64)
        x, q = torch.randn(1, 0, 4), torch.randn(1, 0, 2, 4)
        assert ops.token_shift(x, cu_seqlens=cu, parents=given)[0].shape == x.shape
        assert ops.attention(q, q, q, cu_seqlens=cu, parents=given).shape == q.shape
        packed: Any = {"cu_seqlens": cu, "parents": given, "output_final_state": True}
        o, state = ops.chunk_simple_gla(q, q, q, q[..., 0], **packed)
        assert o.shape == q.shape
        assert state is not None and state.shape[0] == len(lengths)


def test_compiled_functions_take_trees_in_breaks_of_their_graph() -> None:
    args = made(next(x for x in SAMPLES if x.op == "chunk_simple_gla"), gradients=False)

    def run(q: Tensor, parents: Tensor) -> Tensor:
        given = {**args, "q": 2 * q, "parents": parents}
        return ops.chunk_simple_gla(**given)[0] + 1

    parents = torch.tensor(PARENTS)
    wanted = run(args["q"], parents)
    assert torch.equal(torch.compile(run, backend="eager")(args["q"], parents), wanted)

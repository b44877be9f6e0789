"""Operators under context parallelism, in processes on a CPU, beside the same in one process."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.kernels.attention import context as attention_across_ranks
from slipstream.kernels.attention import op as attention_op
from slipstream.ops import attention
from slipstream.parallel import ContextParallel, shard
from slipstream.runtime import context_exchange, context_parallel
from slipstream.tools.catalog import OPERATORS, Sample, flat
from tests.support.memory import Allocated
from tests.support.operators import Size, has_time, over_time, packed

RANKS = 3


@dataclass(frozen=True)
class Cut:
    """Tokens of each rank; sequences packed in the batch, or None for a batch of two rows."""

    name: str
    lengths: tuple[int, ...]
    sequences: tuple[int, ...] | None = None


CUTS = (
    Cut("rows", (20, 33, 11)),
    Cut("rows-one-rank-empty", (30, 0, 34)),
    # within a rank, across two, through a whole one; empty ones at a cut and at the end
    Cut("packed", (30, 17, 43), (11, 60, 0, 19, 0)),
    Cut("packed-at-the-cuts", (32, 16, 16), (32, 0, 16, 16)),
    Cut("packed-one-rank-empty", (40, 0, 10), (50,)),
)
# each of fewer tokens than a convolution's kernel
SHORT_CUTS = (
    Cut("rows-of-few-tokens", (2, 1, 3)),
    Cut("packed-few-tokens", (1, 2, 6), (7, 2)),
    Cut("packed-few-tokens-first", (3, 1, 2), (2, 4)),
)
_QKV, _THREES = "q=BTGK k=BTHK v=BTHV", "q=BT6K k=BT3K v=BT3V"
_COPIED = "q=BT6K k=BT2K v=BT2V"  # heads of k and v go to several ranks
MODEL_CUTS = [CUTS[0], CUTS[2], CUTS[4]]
# where blocks of 4 begin
# the catalogue's have more keys than queries
ATTENTION = (
    Sample("attention", _QKV),
    Sample("attention", _QKV, variant="full", options={"causal": False}),
    Sample("attention", _QKV, variant="window", options={"window_size": 25}),
    Sample("attention", f"{_QKV} g=BTG:gate sinks=G", variant="gate"),
    # as many heads on each rank: these are exchanged
    Sample("attention", _THREES, variant="heads"),
    Sample("attention", _THREES, variant="full heads", options={"causal": False}),
    Sample("attention", f"{_THREES} g=BT6:gate sinks=6", variant="gated heads"),
    Sample("attention", _COPIED, variant="copied heads"),
    Sample("attention", f"{_COPIED} g=BT6:gate sinks=6", variant="gated copied heads"),
)
_CATALOGUE = [x for x in OPERATORS if "context" in x.takes and x.op != "attention"]
# beta for each column of v is refused
CALLS = [
    x
    for x in (*_CATALOGUE, *ATTENTION)
    if x.tested and not x.packed and x.dims.get("beta") != "BTGV"
]


def whole(op: Sample, cut: Cut, gate: str) -> dict[str, Any]:
    """The arguments of the whole batch, the same in every process."""
    torch.manual_seed(hash_of(op.name + cut.name))
    total = sum(cut.lengths)
    size = Size(T=total, dtype=torch.float64, gate=gate)
    return op.inputs(packed(size, *cut.sequences) if cut.sequences else size)


def hash_of(text: str) -> int:
    return sum(i * ord(c) for i, c in enumerate(text, 1))


def weights(shapes: list[torch.Size]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]


def leaves(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments with gradients asked for, and each tensor that takes one by its name."""
    given, found = {}, {}
    for name, value in args.items():
        each = value if isinstance(value, tuple) else (value,)
        for i, x in enumerate(each):
            if isinstance(x, Tensor) and x.is_floating_point():
                found[f"{name}{i or ''}"] = x.detach().clone().requires_grad_()
        mine = [found.get(f"{name}{i or ''}", x) for i, x in enumerate(each)]
        given[name] = tuple(mine) if isinstance(value, tuple) else mine[0]
    return given, found


def alone(op: Sample, args: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and gradients by name, of the whole batch in one process."""
    given, inputs = leaves(args)
    outputs = flat(op(given, impl="eager"))
    loss = sum((x * w).sum() for x, w in zip(outputs, weights([x.shape for x in outputs])))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return [x.detach() for x in outputs], dict(zip(inputs, grads))


def across(
    op: Sample, args: dict[str, Any], cut: Cut, segment_tokens: int | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of this rank's tokens: its part of o, the whole final state, and its gradients."""
    offsets = args.get("cu_seqlens")
    context = ContextParallel(None, offsets, cut.lengths, segment_tokens)
    begin = sum(cut.lengths[: context.rank])
    end = begin + cut.lengths[context.rank]
    mine = over_time(op, args, begin, end)
    if "initial_state" in args:
        mine["initial_state"] = args["initial_state"]
    given, inputs = leaves(mine)
    outputs = flat(op(given, impl="eager", context=context))
    total = sum(cut.lengths)
    shapes = [torch.Size((outputs[0].shape[0], total, *outputs[0].shape[2:]))]
    shapes += [x.shape for x in outputs[1:]]
    o, *states = weights(shapes)
    loss = (outputs[0] * o[:, begin:end]).sum()
    # a third on each rank: what arrives there is added up
    loss = loss + sum((x * w).sum() for x, w in zip(outputs[1:], states)) / context.size
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return [x.detach() for x in outputs], dict(zip(inputs, grads))


def compare(
    op: Sample, cut: Cut, gate: str, segment_tokens: int | None = None, want: Any = None
) -> list[str]:
    """The differences, on this rank; want: what `alone` gives."""
    args = whole(op, cut, gate)
    (o, *states), grads = alone(op, args) if want is None else want
    (mine, *my_states), my_grads = across(op, args, cut, segment_tokens)
    rank = dist.get_rank()
    begin = sum(cut.lengths[:rank])
    tokens = slice(begin, begin + cut.lengths[rank])
    pairs = {"o": (mine, o[:, tokens])}
    pairs |= {f"state {i}": x for i, x in enumerate(zip(my_states, states, strict=True))}
    for name, x in my_grads.items():
        if name in op.dims and has_time(op, name):
            steps = 2 if "R" in op.dims[name] else 1
            at = slice(steps * tokens.start, steps * tokens.stop)
            pairs[f"d {name}"] = (x, grads[name][:, at])
        else:  # states and parameters: ranks' gradients add up
            x = x.contiguous()
            dist.all_reduce(x)
            pairs[f"d {name}"] = (x, grads[name])
    wrong = []
    for name, (x, y) in pairs.items():
        size = float(y.abs().max()) if y.numel() else 0.0
        off = float((x - y).abs().max()) if y.numel() else 0.0
        if x.shape != y.shape or not off <= 1e-9 * max(size, 1.0):
            wrong.append(f"{op.name} {cut.name} {gate} rank {rank} {name}: {off:.1e} of {size:.1e}")
    return wrong


def compare_all(rank: int, cases: list[tuple[str, Cut, str]], found: Any) -> None:
    """The work of a process; differences go into the queue."""
    by_name, ranks = {x.name: x for x in CALLS}, dist.get_world_size()
    mine = [alone(by_name[op], whole(by_name[op], *rest)) for op, *rest in cases[rank::ranks]]
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    for i, (op, cut, gate) in enumerate(cases):
        for line in compare(by_name[op], cut, gate, want=every[i % ranks][i // ranks]):
            found.put(line)


def mixed_options(rank: int, found: Any) -> None:
    """Time backwards with V-first states, and 16 bits, where only rounding differs."""
    by_name, cut = {x.name: x for x in CALLS}, CUTS[2]
    turned = {"reverse": True, "state_v_first": True}
    names = "chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_rwkv7"
    for name in names:
        op = by_name[name]
        for line in compare(replace(op, states="NGVK", options=turned), cut, "mixed"):
            found.put(line)
        args = whole(op, cut, "weak")
        low = cast_down(args)
        (o, *_), _ = alone(op, low)
        (mine, *_), _ = across(op, low, cut)
        begin = sum(cut.lengths[:rank])
        want = o[:, begin : begin + cut.lengths[rank]].double()
        off = float((mine.double() - want).norm() / want.norm())
        if mine.dtype != torch.bfloat16 or not off < 1e-2:
            found.put(f"{name} bfloat16 rank {rank}: {mine.dtype} {off:.1e}")
    x = by_name["chunk_hgrn"]
    for line in compare(replace(x, options={"reverse": True}), cut, "mixed"):
        found.put(line)


def deterministic(rank: int, found: Any) -> None:
    """The mode of equal bits, of the public operators (test_context_bits.py has the bits)."""
    by_name = {x.name: x for x in CALLS}
    cuts = Cut("rows", (16, 48, 0)), Cut("packed", (27, 32, 31), (11, 48, 0, 31))
    names = "chunk_kda", "chunk_gla", "chunk_gated_delta_product", "attention-heads", "chunk_gsa"
    names += "chunk_hgrn", "selective_scan"
    for name, cut in itertools.product(names, cuts):
        for line in compare(by_name[name], cut, "mixed", 16):
            found.put(line)
    turned = replace(by_name["chunk_simple_gla"], options={"reverse": True})
    whole_segments = Cut("packed", (32, 16, 32), (16, 48, 16))
    for line in compare(turned, whole_segments, "mixed", 16):
        found.put(line)


def attention_lse(rank: int, found: Any) -> None:
    """lse and its gradients, slopes of each sequence, a window; gathered keys and heads."""
    for heads, cut in itertools.product((2, 3), (CUTS[2], CUTS[3])):
        assert cut.sequences is not None
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, sum(cut.lengths), n, 8, dtype=torch.float64)
            for n in (2 * heads, heads, heads)
        )
        slopes = torch.rand(len(cut.sequences), 2 * heads, dtype=torch.float64)
        offsets = torch.tensor([0, *cut.sequences]).cumsum(0).int()
        options: dict[str, Any] = {
            "window_size": 25, "return_lse": True, "alibi_slopes": slopes, "impl": "eager",
        }  # fmt: skip
        do, dlse = weights([q.shape, torch.Size((1, 2 * heads, q.shape[1]))])
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = attention(*whole, cu_seqlens=offsets, **options)
        grads = torch.autograd.grad([o, lse], whole, [do, dlse])
        context = ContextParallel(None, offsets, cut.lengths)
        mine = [shard(x, context).clone().requires_grad_() for x in (q, k, v)]
        my_o, my_lse = attention(*mine, context=context, **options)
        at = slice(*context.bounds(q.shape[1]))
        mine = torch.autograd.grad([my_o, my_lse], mine, [do[:, at], dlse[..., at]])
        pairs = [(my_o, o[:, at]), (my_lse, lse[..., at])]
        pairs += [(x, y[:, at]) for x, y in zip(mine, grads)]
        for i, (x, y) in enumerate(pairs):
            off = float((x - y).abs().max()) if y.numel() else 0.0
            if not off < 1e-9:
                found.put(f"{heads} heads, {cut.name}, rank {rank}: {i} is off by {off:.1e}")


def cast_down(args: dict[str, Any]) -> dict[str, Any]:
    """Activations in bfloat16; gates and states in float32."""
    wide = ("g", "beta", "w", "initial_state")
    return {
        n: x if not x.is_floating_point() else x.float() if n in wide else x.bfloat16()
        for n, x in args.items()
    }


def attention_bytes(rank: int, found: Any) -> None:
    """The share of a rank of two in the memory of one with all tokens: in a forward pass without
    gradients of q, k, v and o, and with backward of these, the gradients of all four, and the
    float32 sums of dq that a GPU's kernel has."""

    def outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any, impl: str) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return q.new_empty(*q.shape[:3], v.shape[-1]), lse

    def gradients(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
        sums = q.new_empty(q.shape, dtype=torch.float32)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        grads[0].copy_(sums)
        return grads

    context = ContextParallel()
    q, k, v, do = (torch.randn(1, 1024, 16, 128, dtype=torch.bfloat16) for _ in range(4))
    with (
        mock.patch.object(attention_across_ranks, "MIN_GROUP_ROWS", 1),
        mock.patch.object(attention_op, "call_forward", outputs),
        mock.patch.object(attention_op, "call_backward", gradients),
    ):
        with torch.no_grad(), Allocated([q, k, v]) as forward:
            attention(q, k, v, context=context, impl="eager")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with Allocated([q, k, v, do]) as both:
            o = attention(*leaves, context=context, impl="eager")
            grads = torch.autograd.grad(o, leaves, do)
    assert len(grads) == 3
    whole = 2 * q.nbytes
    found.put(
        ((forward.peak + 3 * q.nbytes) / (4 * whole), (both.peak + 4 * q.nbytes) / (10 * whole))
    )


def bytes_exchanged(rank: int, found: Any) -> None:
    """(operator, (bytes for few tokens, for twice as many)), forward and backward."""
    counted, gather = [0], context_exchange.all_gather
    to_others = context_exchange.all_to_all

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            tensor = next(x for x in reversed(args) if isinstance(x, Tensor))
            counted[0] += tensor.numel() * tensor.element_size()
            return call(*args, **options)

        return run

    with (
        mock.patch.object(context_parallel, "all_gather", counting(gather)),
        mock.patch.object(context_parallel, "all_to_all", counting(to_others)),
        mock.patch.object(dist, "all_reduce", counting(dist.all_reduce)),
    ):
        first = {x.op: x for x in reversed(CALLS) if x.op != "attention"}
        for op in first.values():
            totals = []
            for n in (1, 2):
                cut = Cut("", (20 * n, 30 * n, 10 * n), (15 * n, 40 * n, 5 * n))
                counted[0] = 0
                across(op, whole(op, cut, "weak"), cut)
                totals.append(counted[0])
            if rank == 0:
                found.put((op.name, tuple(totals)))


def replayed(rank: int, found: Any) -> None:
    """Calls with exchanges inside, recorded and played on a CPU."""
    from slipstream.runtime import call_replay, parallel_compile

    by_name = {x.name: x for x in CALLS}
    names = "chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule"
    compiled = parallel_compile.compile_kernels
    played, play = [0], call_replay.RecordedCall.play

    def counting(self: Any, *args: Any) -> Any:
        played[0] += 1
        return play(self, *args)

    def alone_on(x: int, call: Any, args: Any) -> None:
        """The call by one rank: the others are not there."""
        if rank == x:
            compiled(call, args)

    # in rows: plain torch asks for the offsets of packed ones
    for name, cut in itertools.product(names, CUTS[:2]):
        op = by_name[name]
        for turn in range(4):
            with (
                mock.patch.object(call_replay, "is_enabled", return_value=True),
                mock.patch.object(call_replay.RecordedCall, "play", counting),
                mock.patch.object(parallel_compile, "compile_kernels", partial(alone_on, 1)),
            ):
                args = whole(op, replace(cut, name=f"{cut.name}{turn}"), "weak")
                mine, my_grads = across(op, args, cut)
            outs, grads = across(op, args, cut)
            pairs = zip([*outs, *grads.values()], [*mine, *my_grads.values()], strict=True)
            if not all(torch.equal(x, y) for x, y in pairs):
                found.put(f"{name} {cut.name} rank {rank}: call {turn} differs")
        if played[0] < 4:
            found.put(f"{name} {cut.name} rank {rank}: {played[0]} calls played, want 4")
        played[0] = 0


def compare_models(rank: int, mixers: list[Any], cuts: list[Cut], found: Any) -> None:
    """The losses and gradients of a model, packed and in rows; the ranks' add up to the whole's,
    which one of them computes."""
    from tests.support.language_models import small_model

    sizes = {"vocab_size": 31, "intermediate_size": 24}
    model = small_model(mixers, initializer_range=0.2, **sizes).double().train()
    for i, cut in enumerate(cuts):
        rows, compares = 1 if cut.sequences else 2, rank == i % dist.get_world_size()
        ids = torch.randint(0, 31, (rows, sum(cut.lengths)))
        offsets = None
        if cut.sequences:
            offsets = torch.tensor([0, *cut.sequences]).cumsum(0).int()
        want, grads, parameters = None, None, list(model.parameters())
        if compares:
            want = model(ids, labels=ids, cu_seqlens=offsets).loss
            grads = torch.autograd.grad(want, parameters, allow_unused=True)
        context = ContextParallel(None, offsets, cut.lengths)
        mine = shard(ids, context)
        if cut == CUTS[2]:  # whose second forward exchanges again, in backward
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(mine, labels=mine, context=context).loss
        loss.backward()
        total = context.sum(loss)
        sums = [None if p.grad is None else context.sum(p.grad) for p in parameters]
        if want is not None and grads is not None:
            if not abs(float(total - want)) < 1e-9:
                found.put(f"{cut.name} rank {rank}: loss {total} instead of {want}")
            for (name, _), x, grad in zip(model.named_parameters(), sums, grads, strict=True):
                assert (grad is None) == (x is None), name
                off = 0.0 if grad is None or x is None else float((x - grad).abs().max())
                if not off < 1e-9:
                    found.put(f"{cut.name} rank {rank} {name}: off by {off:.1e}")
        model.gradient_checkpointing_disable()
        model.zero_grad()

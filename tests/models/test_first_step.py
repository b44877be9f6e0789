"""Compiling a model's kernels before its first step leaves no trace but compiled kernels; each of
several ranks does it alone."""

from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.op import Extras, forward_impl, linear
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, first_step
from slipstream.models import model as model_module
from slipstream.parallel import ContextParallel
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.parallel_compile import _ProtectInputs
from tests.support import wants
from tests.support.processes import in_processes


def small(*mixers: str) -> Any:
    torch.manual_seed(0)
    config = SlipstreamConfig(vocab_size=50, hidden_size=32, num_heads=2, mixers=[*mixers])
    return SlipstreamForCausalLM(config).train()


def launches(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Like which blocks compile_once runs some forward and backward, with launches as they are."""
    seen: list[int] = []
    like = first_step._like

    def recorded(model: Any, i: int, h: Any) -> Any:
        seen.append(i)
        return like(model, i, h)

    monkeypatch.setattr(first_step, "_like", recorded)
    monkeypatch.setattr(first_step, "compile_kernels", lambda call, args: call(*args))
    monkeypatch.setattr(first_step._next, "loss", torch.sum)
    h = torch.randn(2, 20, 32)
    state = torch.get_rng_state()
    for _ in range(2):
        first_step.compile_once(model.model, h, None, None)
    assert torch.equal(torch.get_rng_state(), state) and not h.requires_grad
    return seen


@pytest.mark.parametrize(
    ("mixers", "blocks"),
    [
        (("kda", "kda", "attention", "kda", "attention"), [0, 2]),
        (("rwkv7", "rwkv7", "rwkv7"), [0, 1]),
    ],
)
def test_each_kind_of_block_runs_once(
    mixers: tuple[str, ...], blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(*mixers)
    assert launches(model, monkeypatch) == blocks
    assert all(p.grad is None for p in model.parameters())


def test_replicas_of_data_parallel_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gla")
    calls: list[Any] = []
    monkeypatch.setattr(first_step, "compile_kernels", lambda *args: calls.append(args))
    replica = model.model._replicate_for_data_parallel()
    first_step.compile_once(replica, torch.randn(2, 20, 32), None, None)
    assert not calls
    first_step.compile_once(model.model, torch.randn(2, 20, 32), None, None)
    assert len(calls) == 1


def test_each_kind_of_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not, whole or over ranks, on each device, of each dtype that it computes in."""
    model, calls = small("gla"), []
    monkeypatch.setattr(first_step, "compile_kernels", lambda *args: calls.append(args))
    h, offsets, context = torch.randn(1, 20, 32), torch.tensor([0, 5, 20]), object()
    for _ in range(2):
        wide = (h, None), (h, offsets), (h, None, None, context), (h.to("meta"), None)
        for step in (*wide, (h.bfloat16(), None)):
            first_step.compile_once(model.model, *(*step, None, None)[:4])
        with torch.autocast("cpu", torch.bfloat16):
            first_step.compile_once(model.model, h, None, None)
    assert len(calls) == 6


@pytest.mark.parametrize("packed", [False, True])
def test_loss_is_compiled_beside_blocks(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small("gla"), torch.randint(0, 50, (2, 20))
    losses: list[Any] = []
    plain = model._loss

    def counted(h: Any, target: Any, num_items: Any) -> Any:
        losses.append((h.shape, target.shape, h.requires_grad))
        return plain(h, target, num_items)

    model._loss = counted

    def compile_blocks(inner: Any, h: Any, *args: Any, **named: Any) -> Any:
        first_step.compile_once(inner, h, None, None)

    monkeypatch.setattr(first_step, "compile_kernels", lambda call, args: call(*args))
    monkeypatch.setattr("slipstream.models.model.compile_blocks", compile_blocks)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 15:] = 0
    loss = model(input_ids=ids, labels=ids, attention_mask=mask if packed else None).loss
    loss.backward()
    rows = (1, 35) if packed else (2, 20)
    assert losses[0] == ((*rows, 32), rows, True) and len(losses) == 2
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    again = model(input_ids=ids, labels=ids, attention_mask=mask if packed else None).loss
    again.backward()
    assert len(losses) == 3 and torch.equal(loss, again)
    assert all(map(torch.equal, grads, (p.grad for p in model.parameters())))
    # of a head with hooks nothing is known
    model.lm_head.register_forward_hook(lambda *args: None)
    assert first_step.loss_of(model, ids, None) is None
    assert first_step.loss_of(small("gla"), None, None) is None


@pytest.mark.parametrize("packed", [False, True])
def test_embedding_is_compiled_too(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once with the blocks, which are not compiled again when it has run."""
    model, ids = small("attention"), torch.randint(0, 50, (2, 20))
    seen: list[str] = []
    embed, like = first_step.embedding, first_step._like

    def recorded(name: str, fn: Any) -> Any:
        return lambda *args: [seen.append(name), fn(*args)][1]

    def compile_kernels(run: Any, args: Any) -> None:
        seen.append("begin")
        run(*args)
        seen.append("end")

    monkeypatch.setattr(first_step, "_trains", lambda *args: True)
    monkeypatch.setattr(first_step, "compile_kernels", compile_kernels)
    monkeypatch.setattr(first_step, "embedding", recorded("embedding", embed))
    monkeypatch.setattr(first_step, "_like", recorded("block", like))
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 15:] = 0
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, attention_mask=mask if packed else None).loss
        assert loss.isfinite()
    assert seen == ["begin", "embedding", "block", "end"]


@pytest.mark.parametrize("trained", [True, False])
def test_block_is_like_the_models(trained: bool) -> None:
    """In dtypes, and in which parameters are trained; whatever wraps the model's."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = small("gated_deltanet").to(torch.bfloat16).model
    own = model.layers[0]
    own.mixer.A_log.data = own.mixer.A_log.data.float()
    own.mixer.o_proj.weight.requires_grad_(trained)
    model.layers[0] = checkpoint_wrapper(own)
    block = first_step._like(model, 0, torch.randn(2, 20, 32, dtype=torch.bfloat16))
    assert block.training and type(block) is type(own)
    for (name, p), (other, q) in zip(block.named_parameters(), own.named_parameters(), strict=True):
        assert name == other
        assert (p.shape, p.dtype, p.device) == (q.shape, q.dtype, q.device), name
        assert p.requires_grad == q.requires_grad and p.data_ptr() != q.data_ptr(), name


def test_delta_rule_saves_as_its_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while launches only compile: else its step compiles another kernel later, alone."""
    seen: list[Any] = []

    def saving(*args: Any) -> Any:
        seen.append(of_thread.warmup)
        return forward_impl(*args[:-2], "eager", args[-1], extras=Extras(save=True))

    monkeypatch.setattr("slipstream.kernels.linear.op._call_forward_saving", saving)
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    terms = LinearInputs(q, k, v, beta=torch.rand(1, 9, 2))
    for warmup in (None, Future()):
        monkeypatch.setattr(of_thread, "warmup", warmup)
        with nullcontext() if warmup is None else _ProtectInputs():
            linear(terms, ForwardCall(0.5, 32, "sm90|eager"))
    assert len(seen) == 2 and seen[1] is not None


@pytest.mark.parametrize("mixer", ["attention", "gated_deltanet", "kda", "mamba2", "rwkv7"])
def test_kernels_of_the_step(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced for sm_90: what the blocks that only compile launch is what the model's launch."""
    from slipstream.tools.model_kernels import trace_model

    def keys() -> set[str]:
        return {x.key for x in trace_model(config, torch.bfloat16, (2, 256), "sm_90", True)}

    config = SlipstreamConfig(vocab_size=512, hidden_size=256, num_heads=4, mixers=[mixer, mixer])
    whole = keys()
    assert whole

    def blocks(self: Any, h: Any, *args: Any) -> tuple[Any, list[Any]]:
        first_step.run_blocks(self, h, None, None, None)
        return h, []

    with_memory = first_step._with_memory

    def without_gradients(*args: Any) -> Any:  # which a torch without CUDA has none of
        made = with_memory(*args)
        for module in made.modules():
            for key, p in module._parameters.items():
                plain: Any = None if p is None else torch.empty_like(p)
                module._parameters[key] = plain
        return made

    def requires_grad_(x: Any, *args: Any) -> Any:
        x.__dict__.pop("detached", None)
        return x

    monkeypatch.setattr(first_step, "_with_memory", without_gradients)
    monkeypatch.setattr(torch.Tensor, "requires_grad_", requires_grad_)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **named: ())
    monkeypatch.setattr("slipstream.models.SlipstreamModel._run", blocks)
    assert keys() == whole


RANKS = 2
COLLECTIVES = [
    (dist, "all_reduce"),
    (dist, "all_gather"),
    (torch.ops._c10d_functional, "all_to_all_single"),
    (torch.ops._c10d_functional, "all_gather_into_tensor"),
]


def sharded(dtype: torch.dtype) -> Any:
    """As torchtitan makes it: checkpointing around each block, then FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    mixers: list[Any] = [*["gated_deltanet"] * 3, "attention"]
    config = SlipstreamConfig(vocab_size=53, hidden_size=32, num_heads=2, mixers=mixers)
    model = SlipstreamForCausalLM(config).train()
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer)
    mesh = init_device_mesh("cpu", (RANKS,))
    for unit in (*layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    return model


def count_in_process(rank: int, contexts: bool, queue: Any) -> None:
    calls: list[Any] = []
    asked: list[str] = []
    blocks: list[tuple[int, set[torch.dtype]]] = []
    like = first_step._like

    def recorded(model: Any, i: int, h: Any) -> Any:
        block = like(model, i, h)
        blocks.append((i, {p.dtype for p in block.parameters()}))
        return block

    def compile_kernels(run: Any, args: Any) -> None:
        calls.append(run)
        of_thread.warmup = object()  # pyright: ignore[reportAttributeAccessIssue]
        before = len(asked)
        run(*args)
        assert len(asked) == before
        of_thread.warmup = None

    def counted(name: str, collective: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return collective(*args, **options)

        return call

    for where, name in COLLECTIVES:
        setattr(where, name, counted(name, getattr(where, name)))
    first_step._like, first_step.compile_kernels = recorded, compile_kernels
    model = sharded(torch.bfloat16)
    compile_blocks = first_step.compile_blocks

    def on_a_gpu(model: Any, h: Any, *args: Any) -> Any:
        first_step.compile_once(model, h, *args[:3])
        return compile_blocks(model, h, *args)

    model_module.compile_blocks = on_a_gpu
    ids = torch.arange(2 * 64).mul(7).remainder(53).view(2, 64)
    context = ContextParallel() if contexts else None
    for _ in range(2):
        model(input_ids=ids, labels=ids, context=context).loss.backward()
    queue.put((rank, len(calls), blocks, contexts == bool(asked)))


@wants.collectives
@pytest.mark.parametrize("contexts", [False, True], ids=["tokens whole", "context parallelism"])
def test_every_rank_compiles_once_alone(contexts: bool, tmp_path: Path) -> None:
    found = in_processes(RANKS, tmp_path, count_in_process, contexts)
    want = [(0, {torch.bfloat16}), (3, {torch.bfloat16})]
    assert sorted(x[0] for x in found) == [0, 1]
    for _, calls, blocks, exchanges in found:
        assert calls == 1 and blocks == want and exchanges

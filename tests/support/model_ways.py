"""A small language model in the ways that trainers run it, and what it is held to: the loss and the
gradients of the untouched model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from slipstream.models import SlipstreamForCausalLM
from tests.support import module_changes
from tests.support.language_models import LAYERS, small_model

VOCAB, WIDTH = 53, 32
MODELS: dict[str, list[Any]] = {name: [layer] * 2 for name, layer in LAYERS.items()}
# RWKV-7's first value goes past layers that do not use it, and on to a last one
MODELS["hybrid"] = ["gated_deltanet", "rwkv7", "attention", "rwkv7"]

# a step of training: the loss of some tokens, and gradients in the parameters
Step = Callable[[Tensor], Tensor]
# changes a model, and returns how to train it
Way = Callable[[SlipstreamForCausalLM], Step]

# layers whose sizes kernels take, each at once
MODELS["every"] = [*(layers[0] for n, layers in MODELS.items() if n != "hybrid"), "rwkv7"]


def make(name: str, device: str = "cpu", **options: Any) -> SlipstreamForCausalLM:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48}
    model = small_model(MODELS[name], initializer_range=0.2, **sizes, **options)
    return model.train().to(device)


def narrow(x: Tensor) -> Tensor:
    """Rounded to 8 bits, with the gradient of x."""
    return x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach())


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return narrow(x)


class Rounded(nn.Linear):
    """As torchao's Float8Linear: a Linear that multiplies in another way."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(narrow(input), narrow(self.weight), self.bias)


class Round(torch.autograd.Function):
    """To another dtype and back, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype).to(grads[0].dtype), None


class Rounds(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Any:
        return Round.apply(x, self.dtype)


def round_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Every Linear as under autocast, but in float32: of what it takes and gives, and of their
    gradients, what dtype holds."""
    to = Rounds(dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args: (to(args[0]),))
            module.register_forward_hook(lambda module, args, y: to(y))
            if name != "lm_head":  # whose weight is the embedding's
                nn.utils.parametrize.register_parametrization(module, "weight", Rounds(dtype))


def trained(model: nn.Module) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss

    return step


# ---- the ways of training


def checkpointed(model: SlipstreamForCausalLM, **options: Any) -> Step:
    # the method has another name before transformers 5.20
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": options})
    return trained(model)


def selective(model: SlipstreamForCausalLM) -> Step:
    context = partial(create_selective_checkpoint_contexts, module_changes.policy)
    return checkpointed(model, use_reentrant=False, context_fn=context)


def compiled(model: SlipstreamForCausalLM) -> Step:
    torch._dynamo.reset()
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    return trained(model)


def functional(model: SlipstreamForCausalLM) -> Step:
    """As trained, with the weights handed in."""
    weights = dict(model.named_parameters(remove_duplicate=False))

    def step(ids: Tensor) -> Tensor:
        loss = torch.func.functional_call(model, weights, (ids,), {"labels": ids}).loss
        loss.backward()
        return loss

    return step


def hooked(model: SlipstreamForCausalLM) -> Step:
    module_changes.hook(x for x in model.modules() if isinstance(x, nn.Linear | nn.Embedding))
    return trained(model)


def run_blocks(blocks: list[Any], h: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor | None]:
    for block in blocks:
        h, _, value = block(h, first)
        first = value if first is None else first
    return h, first


def staged(model: SlipstreamForCausalLM) -> Step:
    """Two stages of a pipeline: what crosses are leaves on the other side."""
    layers = list(model.model.layers)
    half = len(layers) // 2

    def step(ids: Tensor) -> Tensor:
        out = run_blocks(layers[:half], model.model.embed_tokens(ids), None)
        sent = [x for x in out if x is not None]
        received = [x.detach().requires_grad_() for x in sent]
        h, _ = run_blocks(layers[half:], received[0], *(received[1:] or [None]))
        logits = model.lm_head(model.model.norm(h))[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        used = [(x, y.grad) for x, y in zip(sent, received) if y.grad is not None]
        torch.autograd.backward(*map(list, zip(*used)))
        return loss

    return step


def ddp(model: SlipstreamForCausalLM) -> Step:
    return trained(nn.parallel.DistributedDataParallel(model))


def fsdp(model: SlipstreamForCausalLM) -> Step:
    module_changes.shard([*model.model.layers, model])
    return trained(model)


def hsdp(model: SlipstreamForCausalLM) -> Step:
    """Copies of shards: two by two processes, or one by as many as there are."""
    copies = 2 if dist.get_world_size() == 4 else 1
    module_changes.shard([*model.model.layers, model], copies)
    return trained(model)


def tensor_parallel(model: SlipstreamForCausalLM) -> Step:
    module_changes.split_columns(model, whole=model.lm_head)
    return trained(model)


WAYS: dict[str, Way] = {
    "checkpointed": partial(checkpointed, use_reentrant=False),
    "reentrant": partial(checkpointed, use_reentrant=True),
    "selective": selective,
    "compiled": compiled,
    "functional": functional,
    "hooked": hooked,
    "staged": staged,
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor parallel": tensor_parallel,
}
# those that go together, in the order in which trainers apply them
TOGETHER = ("hooked", "tensor parallel", "checkpointed", "selective", "compiled", "fsdp", "hsdp")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for n, p in model.named_parameters():
        if p.grad is not None:
            n = n.replace("parametrizations.weight.original", "weight")
            # a copy: DTensor's may be a view
            found[n] = getattr(p.grad, "full_tensor", p.grad.clone)()
    return found


def check(name: str, *ways: str, device: str = "cpu", near: float = 1.0) -> None:
    """near: times the errors that are let pass on a CPU."""
    ids = torch.arange(18, device=device).mul(7).remainder(VOCAB).view(2, 9)
    plain, model = make(name, device), make(name, device)
    loss, step = trained(plain)(ids), trained(model)
    for way in ways:
        step = WAYS[way](model)
    torch.testing.assert_close(step(ids), loss, rtol=near * 1e-4, atol=near * 1e-5)
    got, want = gradients(model), gradients(plain)
    torch.testing.assert_close(got, want, rtol=near * 1e-3, atol=near * 1e-5)

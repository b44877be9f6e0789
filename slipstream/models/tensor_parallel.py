"""Tensor parallelism by heads: each rank computes some heads of every mixer, and some channels of
every MLP, and has their parameters alone.

The parameters become DTensors, the heads' in shards and the others' replicated, so that FSDP2,
optimizers, clipping and torch.distributed.checkpoint take them as they are. A mixer runs as it does
on one rank, on the local tensors of its parameters: its input's gradient and its output are summed
over the ranks, each by one all-reduce. head_layouts.py says which rows are whose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from slipstream.layers import Mixer
from slipstream.models.config import TP_STYLE, SlipstreamConfig
from slipstream.models.head_layouts import Heads, Layout, heads_of
from slipstream.runtime.context_exchange import HeadShard, gather_last, sum_gradients, sum_parts
from slipstream.runtime.token_ids import expect_ids

if TYPE_CHECKING:  # a torch may have no collectives
    from torch.distributed.device_mesh import DeviceMesh


class _Parameter(NamedTuple):
    """One that a module had: the names of what it has now, along which dimension they follow each
    other, and a factor."""

    owner: nn.Module
    name: str
    parts: tuple[str, ...]
    dim: int = 0
    scale: float = 1.0


def shard_heads(model: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """The model with its heads divided among the ranks of a mesh, in place.

    Every rank has the same model with the same weights before, and calls it with the same tokens
    afterwards, all of which get the same results. States have the heads of their rank. The
    vocabulary of SlipstreamForCausalLM is sharded as well, if it is a multiple of the ranks; its
    loss then holds no logits, as before. What is no mixer or MLP of slipstream's is whole on every
    rank.

    A parameter of several blocks, such as qkv_proj.weight, becomes one for each (weight_0, ...):
    whole_state_dict undoes it. FSDP2 may shard blocks or the model over another dimension of the
    mesh afterwards, but no module within a mixer.

    Args:
        model: SlipstreamForCausalLM, or any module with layers of slipstream in it.
        mesh: of one dimension.

    Returns:
        model.

    Raises:
        ValueError: the heads of a layer are no multiple of the ranks; n_groups of a Mamba layer is
            neither 1 nor a multiple of them; the heads are sharded already. TypeError: no mesh.

    Cost: in each mixer and MLP one all-reduce of [B, T, D] forward and one backward, and in the
        backward one of each small parameter that all heads share.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: want a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: want one dimension, got {mesh.ndim}; take one of it by its name")
    if is_sharded(model):
        raise ValueError("model: is already sharded by tensor parallelism")
    shard = HeadShard(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    # of every layer before any is changed
    found = [(x, heads) for x in model.modules() if (heads := heads_of(x, shard.size)) is not None]
    dealer = _Dealer(mesh, shard)
    for module, heads in found:
        _install(module, dealer.deal_heads(module, heads), shard)
    inside = {id(x) for module, _ in found for x in module.modules()}
    ends = _ends(model, shard.size)
    for module in model.modules():
        if id(module) in inside or not any(True for _ in _own(module)):
            continue
        if ends and module is ends[0]:
            dealer.deal_embedding(module)
        elif module in ends[1:]:
            dealer.deal_head(module)
        else:
            dealer.deal_whole(module)
    return model


def _ends(model: Any, ranks: int) -> list[nn.Module]:
    """The embedding and the head of our model, if their vocabulary is a multiple of the ranks."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != SlipstreamConfig.model_type:
        return []
    if model.config.vocab_size % ranks:
        return []
    head = getattr(model, "lm_head", None)
    return [getattr(model, "model", model).embed_tokens, *([] if head is None else [head])]


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


class _Dealer:
    """Makes DTensors of parameters; one that two modules share stays one."""

    def __init__(self, mesh: "DeviceMesh", shard: HeadShard) -> None:
        self.mesh, self.shard = mesh, shard
        # by the id of what it replaces, which is kept so that no other gets that id
        self.made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def deal_heads(self, module: nn.Module, heads: Heads) -> list[_Parameter]:
        """The sharded parameters of a mixer or MLP."""
        found = []
        for prefix, owner in module.named_modules():
            for name, parameter in list(_own(owner)):
                full = f"{prefix}.{name}" if prefix else name
                layout = heads.layouts.get(full)
                if layout is not None:
                    found.append(self._deal(owner, name, parameter, layout))
                    continue
                owner._parameters[name] = self._whole(parameter)
                # it is added on every rank, and the sum is to have it once
                once = full in ("o_proj.bias", "out_proj.bias", "down_proj.bias")
                found.append(
                    _Parameter(owner, name, (name,), 0, 1 / self.shard.size if once else 1)
                )
        for name in heads.counts:
            n, ranks = getattr(module, name), self.shard.size
            setattr(module, name, n // ranks if isinstance(n, int) else [x // ranks for x in n])
        if isinstance(module, Mixer):
            module.head_shard, module.norms_across = self.shard, heads.across
        return found

    def deal_whole(self, module: nn.Module) -> None:
        """Marks a module that every rank computes whole."""
        found = []
        for name, parameter in list(_own(module)):
            module._parameters[name] = self._whole(parameter)
            found.append(_Parameter(module, name, (name,)))
        _install(module, found, None)

    def deal_embedding(self, module: Any) -> None:
        """Shards a table of the vocabulary by rows, the same number on each rank."""
        size = module.num_embeddings
        module._parameters["weight"] = self._part(module.weight, 0)
        parameter = _Parameter(module, "weight", ("weight",))
        original, shard = module.forward, self.shard
        first = size // shard.size * shard.rank

        def forward(ids: Tensor) -> Tensor:
            expect_ids("input_ids", ids, size)
            at = ids - first
            here = (at >= 0) & (at < size // shard.size)
            with _local([parameter], shard):
                rows = original(torch.where(here, at, 0))
            return sum_parts(torch.where(here[..., None], rows, 0), shard.group)

        module.forward = forward

    def deal_head(self, module: Any) -> None:
        """The linear layer of the logits, of which each rank has as many."""
        found = []
        for name, parameter in list(_own(module)):
            module._parameters[name] = self._part(parameter, 0)
            found.append(_Parameter(module, name, (name,)))
        original, shard = module.forward, self.shard

        def forward(x: Tensor) -> Tensor:
            with _local(found, shard):
                logits = original(sum_gradients(x, shard.group))
            return gather_last(logits, shard)

        module.forward = forward
        module.__dict__["vocabulary_group"] = shard.group  # what the loss looks at

    def _deal(
        self, owner: nn.Module, name: str, parameter: nn.Parameter, layout: Layout
    ) -> _Parameter:
        blocks = parameter.detach().split(layout.blocks, layout.dim)
        if len(blocks) == 1:
            owner._parameters[name] = self._part(parameter, layout.dim)
            return _Parameter(owner, name, (name,), layout.dim)
        names = tuple(f"{name}_{i}" for i in range(len(blocks)))
        for i, (block, part) in enumerate(zip(blocks, names)):
            if i in layout.whole:
                owner.register_parameter(part, self._whole(parameter, block))
            else:
                owner.register_parameter(part, self._part(parameter, layout.dim, block))
        owner._parameters[name] = None
        joined = owner.__dict__.setdefault("_joined_parameters", {})
        joined[name] = layout.dim, names
        return _Parameter(owner, name, names, layout.dim)

    def _whole(self, parameter: Any, values: Tensor | None = None) -> nn.Parameter:
        """Gathers a whole parameter, or these values of it, on every rank."""
        from torch.distributed.tensor import Replicate

        if values is not None:
            return self._made(parameter, values.detach().clone(), Replicate())
        return self._once(parameter, lambda: self._whole(parameter, parameter))

    def _part(
        self, parameter: nn.Parameter, dim: int, values: Tensor | None = None
    ) -> nn.Parameter:
        """This rank's part of them along a dimension."""
        from torch.distributed.tensor import Shard

        if values is None:
            return self._once(parameter, lambda: self._part(parameter, dim, parameter))
        size = values.shape[dim] // self.shard.size
        part = values.detach().narrow(dim, self.shard.rank * size, size)
        part = part.clone(memory_format=torch.contiguous_format)
        return self._made(parameter, part, Shard(dim))

    def _made(self, parameter: nn.Parameter, local: Tensor, placement: Any) -> nn.Parameter:
        from torch.distributed.tensor import DTensor

        found = DTensor.from_local(local, self.mesh, [placement], run_check=False)
        return nn.Parameter(found, requires_grad=parameter.requires_grad)

    def _once(self, parameter: nn.Parameter, make: Callable[[], nn.Parameter]) -> nn.Parameter:
        if id(parameter) not in self.made:
            self.made[id(parameter)] = make(), parameter
        return self.made[id(parameter)][0]


@contextmanager
def _local(parameters: list[_Parameter], shard: HeadShard | None) -> Iterator[None]:
    """Modules have the local tensors of their parameters, under the names they had before.

    shard: None where every rank computes the same. Else each has a part of the gradient of what all
    share, and these are summed.
    """
    owners = {id(x.owner): x.owner for x in parameters}
    before = {i: owner._parameters for i, owner in owners.items()}
    now: dict[int, dict[str, Any]] = {
        i: {name: None for name, p in given.items() if p is None} for i, given in before.items()
    }
    for owner, name, parts, dim, scale in parameters:
        found = [_local_part(owner._parameters[part], shard) for part in parts]
        tensor = found[0] if len(found) == 1 else torch.cat(found, dim)
        now[id(owner)][name] = tensor if scale == 1 else tensor * scale
    for i, owner in owners.items():
        owner.__dict__["_parameters"] = now[i]
    try:
        yield
    finally:
        for i, owner in owners.items():
            owner.__dict__["_parameters"] = before[i]


def _local_part(parameter: Any, shard: HeadShard | None) -> Tensor:
    local = parameter.to_local()
    if shard is None or not all(x.is_replicate() for x in parameter.placements):
        return local
    return sum_gradients(local, shard.group)


def _install(module: nn.Module, parameters: list[_Parameter], shard: HeadShard | None) -> None:
    """Has the module's forward run on local tensors. With a shard its input's gradient and its
    output, the first if there are several, are summed."""
    original = module.forward

    def forward(x: Tensor, *args: Any, **options: Any) -> Any:
        with _local(parameters, shard):
            if shard is None:
                return original(x, *args, **options)
            found = original(sum_gradients(x, shard.group), *args, **options)
        if not isinstance(found, tuple):
            return sum_parts(found, shard.group)
        return sum_parts(found[0], shard.group), *found[1:]

    module.forward = forward


def whole_state_dict(
    model: nn.Module, state_dict: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The state dict that the model had before shard_heads, with whole tensors. Every rank calls
    it.

    Args:
        state_dict: that of the model as it is; None: model.state_dict(). Its tensors may be whole
            already (torch.distributed.checkpoint.state_dict's full_state_dict).
    """
    given = model.state_dict() if state_dict is None else dict(state_dict)
    found: dict[str, Tensor] = {
        name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in given.items()
    }
    for prefix, module in model.named_modules():
        joined = module.__dict__.get("_joined_parameters", {})
        for name, (dim, parts) in joined.items():
            full = [f"{prefix}.{x}" if prefix else x for x in parts]
            if all(x in found for x in full):  # not on ranks that are given nothing
                whole = torch.cat([found.pop(x) for x in full], dim)
                found[f"{prefix}.{name}" if prefix else name] = whole
    return found


class _Planned(TensorParallelLayer):
    """transformers' own mechanism, from_pretrained with a DistributedConfig, names the mesh by it
    before it loads weights, which each rank reads whole; shard_planned_heads comes after."""

    def install_forward(self, module: Any, mesh: "DeviceMesh") -> Any:
        module.__dict__["planned_mesh"] = mesh
        return module


_PLANNED: Any = _Planned()  # transformers' register asks for a function, and wants an instance
ALL_PARALLEL_STYLES.register(TP_STYLE, _PLANNED)


def shard_planned_heads(model: nn.Module) -> None:
    """shard_heads over the mesh that transformers has named, if it has."""
    found = [m for x in model.modules() if (m := x.__dict__.pop("planned_mesh", None)) is not None]
    if found:
        shard_heads(model, found[0])


def is_sharded(model: nn.Module) -> bool:
    """Whether shard_heads has sharded the model."""
    return any(isinstance(x, Mixer) and x.head_shard is not None for x in model.modules())

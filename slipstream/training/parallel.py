"""A run whose model is sharded over the processes of torchrun, and whose rows may be cut.

`parallel: {data, shard, context, tensor}` in a config are dimensions of a DeviceMesh: processes of
`data` have whole copies of what `shard` and `context` have in parts (FSDP2), processes of
`context` read the same rows and have a part of each row's tokens, and processes of `tensor` get the
same tokens and compute a part of the heads. data alone is DDP, which transformers' Trainer does.
Checkpoints are torch.distributed.checkpoint's, and can be continued by another number of processes.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as parts
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from slipstream.models import SlipstreamForCausalLM, shard_heads, whole_state_dict
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.training import config, ranks, rows, trainer

SHARDS = "shards"  # folder of a checkpoint
SCHEDULER = "scheduler.pt"


def expect_processes(parallel: config.Parallel, processes: int) -> config.Parallel:
    """With data filled in: as many as are left.

    Raises:
        ValueError: the dimensions are not those of so many processes.
    """
    inner = parallel.shard * parallel.context * parallel.tensor
    data = parallel.data or max(processes // inner, 1)
    if data * inner != processes:
        tensor = f" x tensor {parallel.tensor}" if parallel.tensor > 1 else ""
        raise ValueError(
            f"parallel: data {data} x shard {parallel.shard} x context {parallel.context}{tensor} "
            f"are {data * inner} processes, and {processes} were started; start torchrun "
            f"--nproc-per-node {data * inner} -m slipstream train"
        )
    return config.Parallel(data, parallel.shard, parallel.context, parallel.tensor)


def is_sharded(parallel: config.Parallel) -> bool:
    return parallel.shard * parallel.context * parallel.tensor > 1


def make_mesh(parallel: config.Parallel, device: torch.device) -> DeviceMesh:
    names = ("data", "shard", "context", "tensor")
    sizes = tuple(getattr(parallel, name) for name in names)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def shard_model(model: SlipstreamForCausalLM, mesh: DeviceMesh, device: torch.device) -> None:
    """Shards a model in place: heads over ranks; each block and the rest are units of FSDP2."""
    nn.Module.to(model, device)
    if mesh["tensor"].size() > 1:
        shard_heads(model, mesh["tensor"])
    over = mesh["shard", "context"]._flatten("shard_context")
    if mesh["data"].size() > 1:
        over = mesh["data", "shard_context"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)


class ShardedTrainer(trainer.LMTrainer):
    """Args besides LMTrainer's: mesh, of make_mesh. The model is sharded here."""

    def __init__(self, *, mesh: DeviceMesh, **options: Any) -> None:
        self.mesh = mesh
        args: TrainingArguments = options["args"]
        shard_model(options["model"], mesh, args.device)
        super().__init__(**options)
        # it is sharded already: no DDP around it
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)
        self.computing_alike = mesh["tensor"].size()
        size = mesh["context"].size() * self.computing_alike  # the last dimensions of the mesh
        self.readers = dist.get_rank() // size, dist.get_world_size() // size

    @property
    def context_size(self) -> int:
        return self.mesh["context"].size()

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> Any:
        """That of whole rows, of which this rank then keeps its tokens."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        for batch in batch_samples:
            self._cut(batch)
        if torch.is_tensor(count) and self.args.average_tokens_across_devices:
            # all ranks of a context have counted the same rows; so have those of `tensor`, of whom
            # each has the whole loss
            count = count / self.context_size
        return count

    def _cut(self, batch: dict[str, Any]) -> None:
        """In place: this rank's tokens and the context, if rows are cut."""
        if self.context_size == 1:
            return
        total, size = batch["input_ids"].shape[1], self.context_size
        lengths = [total * (i + 1) // size - total * i // size for i in range(size)]
        plan = ContextParallel(self.mesh["context"], batch.pop("cu_seqlens", None), lengths)
        begin, end = plan.bounds(total)
        for name in ("input_ids", "labels"):
            batch[name] = batch[name][:, begin:end]
        batch["context"] = plan

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        # the ranks of a context add up, and FSDP takes their mean
        if not self.args.average_tokens_across_devices and self.context_size > 1:
            assert torch.is_tensor(loss)
            loss = loss * self.context_size
        return loss

    def eval_batches(self, loader: Any) -> Iterator[tuple[dict[str, Any], bool]]:
        """As many on every rank, since forward is an exchange: whose rows have ended goes on with
        one that does not count."""
        row = torch.zeros(1, self.eval_dataset.row_tokens, dtype=torch.int64, device="cpu")
        blank = {"input_ids": row, "labels": row, "tally": rows.Tally(rows.Cursor(0, ()), 0, 0)}
        batches: Iterator[dict[str, Any]] = iter(loader)
        while True:
            batch = next(batches, None)
            if not ranks.any_of(batch is not None, self.args.device):
                return
            mine = dict(batch or blank)
            self._cut(mine)
            yield mine, batch is not None

    def eval_nats(self, batch: dict[str, Any], targets: int) -> float:
        nats = super().eval_nats(batch, targets)
        if self.context_size == 1:
            return nats
        # of this rank's tokens; every rank of the context counts the whole
        total = torch.tensor([nats], dtype=torch.float64, device=self.args.device)
        dist.all_reduce(total, group=self.mesh["context"].get_group())
        return float(total)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, which each rank has a part of; that of a checkpoint stays in parts."""
        if _internal_call:
            if self.args.should_save and output_dir is not None:
                os.makedirs(output_dir, exist_ok=True)
                self.model.config.save_pretrained(output_dir)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(output_dir)
            return
        options = parts.StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = parts.get_model_state_dict(self.model, options=options)
        every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in self.model.named_parameters()}
        whole = whole_state_dict(self.model, whole)
        whole = {name: x for name, x in whole.items() if name not in tied}
        if self.args.should_save:
            self._save(output_dir, state_dict=whole)
        ranks.wait()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        ranks.wait()  # for the first rank to have made the folder
        state_dict_saver.save(self._states(), checkpoint_id=str(Path(output_dir) / SHARDS))
        if self.args.should_save:
            schedule: Any = self.lr_scheduler
            torch.save(schedule.state_dict(), Path(output_dir) / SCHEDULER)

    @property
    def _bare_optimizer(self) -> Any:
        """Without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _states(self) -> dict[str, Any]:
        model, optimizer = parts.get_state_dict(self.model, self._bare_optimizer)
        return {"model": model, "optimizer": optimizer}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        states = {"model": parts.get_model_state_dict(self.model)}
        state_dict_loader.load(states, checkpoint_id=str(Path(resume_from_checkpoint) / SHARDS))
        parts.set_model_state_dict(self.model, states["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = self._states()
        state_dict_loader.load(states, checkpoint_id=str(Path(checkpoint) / SHARDS))
        parts.set_optimizer_state_dict(self.model, self._bare_optimizer, states["optimizer"])
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

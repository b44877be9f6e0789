"""A rank that takes longer than the other to write its part of a checkpoint, or to end."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import Trainer

from slipstream.training import parallel, ranks
from slipstream.training.trainer import LMTrainer


def write(rank: int, slow: int, path: Path) -> None:
    time.sleep(1.0 * (rank == slow))
    path.touch()


def save_slowly(rank: int, folder: Path, found: Any) -> None:
    """Puts what each rank sees after it has saved: of the first, random states of both, which the
    second is slow to write; of the second, what the first alone writes, slowly: the model, its
    configuration and the schedule. And who has come to its end as the first leaves the group, which
    the second is slow to do."""
    vars_of: Any = Trainer
    vars_of._save_rng_state = lambda self, out: write(rank, 1, Path(out) / f"random of {rank}")
    trainer: Any = object.__new__(LMTrainer)
    trainer._save_rng_state(str(folder))
    if rank == 0:
        found.put(sorted(x.name for x in folder.glob("random of *")))

    module: Any = parallel
    module.parts.get_model_state_dict = lambda *args, **options: {}
    module.whole_state_dict = lambda model, whole: whole
    trainer = object.__new__(parallel.ShardedTrainer)
    config = SimpleNamespace(save_pretrained=lambda out: (Path(out) / f"config of {rank}").touch())
    trainer.model = SimpleNamespace(config=config, named_parameters=lambda **options: [])
    trainer.processing_class = None
    trainer.args = SimpleNamespace(should_save=rank == 0)
    trainer.save_model(str(folder), _internal_call=True)
    module.state_dict_saver = SimpleNamespace(save=lambda states, checkpoint_id: None)
    trainer._states = dict
    trainer.lr_scheduler = SimpleNamespace(state_dict=lambda: {"schedule of": rank})
    trainer._save_optimizer_and_scheduler(str(folder))
    trainer._save = lambda out, state_dict: write(rank, 0, Path(out) / f"model of {rank}")
    trainer.save_model(str(folder))
    if rank == 1:
        names = [x.name for kind in ("config", "model") for x in folder.glob(f"{kind} of *")]
        found.put([*names, *torch.load(folder / parallel.SCHEDULER).items()])

    write(rank, 1, folder / f"end of {rank}")
    seen: list[str] = []

    def end() -> None:
        seen.extend(x.name for x in folder.glob("end of *"))

    with mock.patch.object(dist, "destroy_process_group", end):
        ranks.leave()
    if rank == 0:
        found.put(sorted(seen))

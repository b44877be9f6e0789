"""FSDP2: any module of the model may be a unit of its own. Two processes on the CPU."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slipstream.models import SlipstreamForCausalLM
from tests.support import wants
from tests.support.fsdp2 import EVERY_MIXER, MIXERS, RANKS, compare, make
from tests.support.processes import in_processes, own_group

pytestmark = wants.collectives


def in_process(
    rank: int, cases: list[tuple[str, bool | None]], mixers: list, found: object
) -> None:
    compare(cases, mixers)


# of linear layers with a bias, torch's own among them
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("which", ["blocks", "ends", "mixers", "tied", "everything"])
@own_group()
def test_model_sharded_over_one_process(which: str) -> None:
    """Its parameters are DTensors all the same."""
    compare([(which, None)], EVERY_MIXER if which == "everything" else MIXERS)


# torch says so of every random number of a DTensor on the CPU
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_shards_from_the_meta_device_are_initialised() -> None:
    from torch.distributed.fsdp import fully_shard

    with own_group():
        whole = make("root", EVERY_MIXER)
        with torch.device("meta"):
            sharded = SlipstreamForCausalLM(whole.config)
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for p in sharded.parameters():
                p.fill_(torch.nan)
        sharded.init_weights()
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            shard = p.full_tensor()
            assert shard.isfinite().all(), name
            assert (shard.std() == 0) == (q.std() == 0), name


@pytest.mark.slow
def test_model_sharded_over_two_processes(tmp_path: Path) -> None:
    choices = ("root", "blocks", "ends", "mixers", "tied", "everything")
    cases = [(which, reentrant) for which in choices for reentrant in (None, True, False)]
    in_processes(RANKS, tmp_path, in_process, cases, EVERY_MIXER)

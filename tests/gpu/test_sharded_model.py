"""FSDP2 of a model on one GPU, whose parameters are DTensors all the same."""

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp2 import EVERY_MIXER, compare
from tests.support.processes import own_group

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(),
    reason="needs a CUDA device and NCCL",
)


# of linear layers with a bias, torch's own among them
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("which", ["blocks", "ends", "mixers", "tied", "everything"])
def test_model_sharded_over_one_gpu(which: str) -> None:
    torch.cuda.set_device(0)
    with own_group("nccl"):
        cases = [(which, reentrant) for reentrant in (None, True, False)]
        compare(cases, EVERY_MIXER, "cuda", rtol=1e-2, atol=1e-3)

"""Models on a CUDA device in the ways that trainers run them, a layer of every mixer in one: the
loss and the gradients of the untouched model (tests/models/test_ways.py is this table on a CPU).
FSDP2's parameters are DTensors on one GPU all the same."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.models import SlipstreamForCausalLM
from tests.support.fsdp2 import EVERY_MIXER, compare
from tests.support.model_ways import WAYS, check
from tests.support.processes import own_group
from tests.support.trainer_runs import IDS, PAIRS, STEPS, generated, losses, make, own_loop, trainer

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or not dist.is_nccl_available(),
        reason="needs a CUDA device and NCCL",
    ),
    pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
# float32 sums in another order, through 25 layers
NEAR = 20.0
TOGETHER = [("checkpointed", "compiled", "fsdp"), ("selective", "hsdp"), ("hooked", "checkpointed")]


@pytest.fixture
def process() -> Iterator[None]:
    torch.cuda.set_device(0)
    with own_group("nccl"):
        yield


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("ways", [*((x,) for x in WAYS), *TOGETHER], ids=", ".join)
def test_model_in_a_way_is_the_same_on_cuda(ways: tuple[str, ...]) -> None:
    name = "hybrid" if "compiled" in ways else "every"
    check(name, *ways, device="cuda", near=NEAR)


RUNS: dict[str, dict[str, Any]] = {
    "padded": {},
    "accumulated, checkpointed": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "smoothed": {"label_smoothing_factor": 0.1},
    "workers": {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"},
}


def assert_trains_as_plain_loop(
    name: str, run: str, side: str, folder: Path
) -> SlipstreamForCausalLM:
    want = own_loop(make(name), RUNS[run].get("label_smoothing_factor", 0.0))
    model = make(name)
    found = trainer(model, folder, side, use_cpu=False, **RUNS[run])
    if run == "fp16":
        # at the usual 65536 the first steps are left out: a gradient of 1 in 16 bits overflows
        found.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    found.train()
    assert losses(found) == pytest.approx(want, rel=3e-2 if "16" in run else 2e-3)
    norms = [x["grad_norm"] for x in found.state.log_history if "grad_norm" in x]
    assert len(norms) == STEPS and all(math.isfinite(x) for x in norms)
    return model


@pytest.mark.filterwarnings("ignore")  # of torch and transformers about one another
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("run", RUNS)
def test_trainer_is_the_plain_loop_on_cuda(run: str, side: str, tmp_path: Path) -> None:
    """One mixer of each family; all rows of a dtype take the same kernels."""
    assert_trains_as_plain_loop("hybrid", run, side, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "side"), [("padded", "left"), ("bf16", "right")])
@pytest.mark.parametrize("name", PAIRS)
def test_trained_mixer_saved_generates_the_same_on_cuda(
    name: str, run: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mixers: a row with all of them compiles kernels for minutes."""
    if "mla" in name:  # its weights are in float32, which no kernel of its decoding takes
        monkeypatch.setenv("SLIPSTREAM_FALLBACK", "warn")
    model = assert_trains_as_plain_loop(name, run, side, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    again = SlipstreamForCausalLM.from_pretrained(tmp_path / "saved").cuda().eval()
    ids = IDS[:, :4].cuda()
    assert torch.equal(generated(again, ids), generated(model.eval(), ids))


@pytest.mark.parametrize("which", ["blocks", "ends", "mixers", "tied", "everything"])
def test_model_sharded_over_one_gpu(which: str) -> None:
    torch.cuda.set_device(0)
    with own_group("nccl"):
        cases = [(which, reentrant) for reentrant in (None, True, False)]
        compare(cases, EVERY_MIXER, "cuda", rtol=1e-2, atol=1e-3)

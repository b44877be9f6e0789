"""Models in the ways that trainers run them, alone and together: each gives the loss and the
gradients of the untouched model."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import model_ways, module_changes, wants
from tests.support.model_ways import MODELS, TOGETHER, VOCAB, WAYS, check, gradients, make, trained
from tests.support.processes import in_processes

pytestmark = [
    wants.collectives,
    # of linear layers with a bias, torch's own among them
    pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning"),
    # of Dynamo, where FSDP's hooks made a tensor
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

process = module_changes.process
SINGLES = [
    pytest.param(
        name, way, marks=() if name == "hybrid" and way != "compiled" else pytest.mark.slow
    )
    for name in MODELS
    for way in WAYS
    if name != "every"
]
# whose layers share tables of positions, in forward alone
SINGLES += [pytest.param("every", "selective")]
EXCLUSIVE = [{"checkpointed", "selective"}, {"fsdp", "hsdp"}, {"tensor parallel", "fsdp"}]
EXCLUSIVE += [{"tensor parallel", "hsdp"}]
PAIRS = [x for x in combinations(TOGETHER, 2) if set(x) not in EXCLUSIVE]
TRIPLES = [(a, "compiled", b) for a in ("checkpointed", "selective") for b in ("fsdp", "hsdp")]
SAMPLE = {("checkpointed", "compiled", "fsdp"), ("selective", "fsdp")}


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("name", "way"), SINGLES)
def test_model_trained_in_a_way_is_the_same(name: str, way: str) -> None:
    check(name, way)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(x, id=", ".join(x), marks=() if x in SAMPLE else pytest.mark.slow)
        for x in [*PAIRS, *TRIPLES]
    ],
)
def test_model_trained_in_ways_together_is_the_same(ways: tuple[str, ...]) -> None:
    check("hybrid", *ways)


def _in_process(rank: int, many: list[tuple[str, ...]], found: object) -> None:
    for ways in many:
        check("hybrid", *ways)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_model_trained_by_processes_is_the_same(ranks: int, tmp_path: Path) -> None:
    """With four processes, HSDP has two copies of two shards."""
    many = [("ddp",), ("checkpointed", "ddp"), ("fsdp",), ("hsdp",), ("tensor parallel",)]
    many += [("selective", "hsdp"), *TRIPLES]
    in_processes(ranks, tmp_path, _in_process, many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("way", ["plain", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(which=lambda name, way, dtype: name == "hybrid")
def test_model_under_autocast_learns_the_same(name: str, way: str, dtype: torch.dtype) -> None:
    """float32 weights get float32 gradients, as far off as those of a model in float32 whose
    products are rounded."""
    ids = torch.arange(18).mul(7).remainder(VOCAB).view(2, 9)
    plain, model, noisy = make(name), make(name), make(name)
    want = trained(plain)(ids)
    step = trained(model) if way == "plain" else WAYS[way](model)
    with torch.autocast("cpu", dtype=dtype):
        loss = step(ids)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=torch.finfo(dtype).eps, atol=0.0)
    model_ways.round_products(noisy, dtype)
    trained(noisy)(ids)
    got, want_grads, others = (gradients(x) for x in (model, plain, noisy))
    assert got.keys() == want_grads.keys() == others.keys()

    def total(grads: dict[str, Tensor]) -> float:
        off = [(grads[n] - x).square().sum() for n, x in want_grads.items()]
        return float(torch.stack(off).sum().sqrt())

    every = torch.stack([x.square().sum() for x in want_grads.values()]).sum().sqrt()
    assert total(got) < 2 * total(others)
    share = total(others) / float(every)
    for n, grad in want_grads.items():
        assert got[n].dtype == torch.float32
        top = max(float(grad.norm()), 0.05)  # less is nothing but rounding
        near = 3 * max(share * top, float((others[n] - grad).norm()))
        assert float((got[n] - grad).norm()) < near, n

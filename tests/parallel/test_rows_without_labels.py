"""Ranks of whose rows none has a label that counts: a loss of 0 and no gradient, on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.integrations.context import call_in_context
from slipstream.parallel import ContextParallel
from tests.support import wants
from tests.support.ignored_rows import faults, of_a_group
from tests.support.language_models import small_model
from tests.support.processes import in_processes
from tests.support.transformers_context import make

pytestmark = [wants.collectives, pytest.mark.filterwarnings("ignore")]
IDS = torch.arange(8).view(2, 4)
NO_LABELS = torch.full_like(IDS, -100)


def check(rank: int, found: Any) -> None:
    own, llama = small_model(["gla", "attention"]), make("LlamaForCausalLM")
    plan = ContextParallel(None)
    losses = {
        "own": (own, own(IDS, labels=NO_LABELS, context=plan).loss),
        "llama": (llama, call_in_context(llama, plan, input_ids=IDS, labels=NO_LABELS).loss),
    }
    for name, (model, loss) in losses.items():
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if loss != 0 or not grads or any(x.any() for x in grads):
            found.put(f"{name}: a loss of {loss}, or gradients")
    for fault in faults(of_a_group(dist.group.WORLD)):
        found.put(fault)


def test_ranks_without_labels_have_no_gradient(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, check) == []

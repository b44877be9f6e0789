"""Patched models of transformers whose tokens are divided among processes, on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from slipstream.integrations.context import TYPES, call_in_context
from slipstream.integrations.transformers import NAME, unpatch
from slipstream.parallel import ContextParallel
from tests.support import wants
from tests.support.processes import in_processes, own_group
from tests.support.transformers_context import NAMES, make, run_models

pytestmark = [wants.collectives, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    unpatch()


def equal(names: list[str], checkpointed: bool, folder: Path) -> None:
    assert in_processes(2, folder, run_models, names, checkpointed) == []


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Losses and gradients, of rows and of packed sequences."""
    equal(["Qwen3NextForCausalLM"], False, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_type_on_two_processes(checkpointed: bool, tmp_path: Path) -> None:
    equal([x for x in NAMES if hasattr(transformers, x)], checkpointed, tmp_path)


def test_types_are_those_that_are_tested() -> None:
    classes = [getattr(transformers, x) for x in NAMES if hasattr(transformers, x)]
    assert {x.config_class.model_type for x in classes} <= set(TYPES)
    assert len(TYPES) == len({*TYPES}) == len(NAMES)


@own_group()
def test_refusals_are_named() -> None:
    plan, ids = ContextParallel(), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"context: want a model of .*, got mamba2"):
        call_in_context(make("Mamba2ForCausalLM"), plan, input_ids=ids)
    model = make("LlamaForCausalLM")
    with pytest.raises(ValueError, match="position_ids: want None with a context"):
        call_in_context(model, plan, input_ids=ids, position_ids=ids)
    with pytest.raises(ValueError, match="use_cache: want None with a context"):
        call_in_context(model, plan, input_ids=ids, use_cache=True)
    assert call_in_context(model, plan, input_ids=ids, use_cache=False).logits.shape[1] == 4
    with pytest.raises(ValueError, match="output_router_logits: want False"):
        call_in_context(model, plan, input_ids=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits: want False"):
        call_in_context(model, plan, input_ids=ids, output_router_logits=None)
    model.config.output_router_logits = False
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=f"want attn_implementation='{NAME}'.*got sdpa"):
        call_in_context(model, plan, input_ids=ids)


@pytest.mark.parametrize("by_layer_type", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@own_group()
def test_angles_that_follow_from_the_length_are_refused(kind: str, by_layer_type: bool) -> None:
    """A rank sees the largest position of its own tokens, not the batch's."""
    plan, ids = ContextParallel(), torch.ones(1, 13, dtype=torch.int64)
    model = make("LlamaForCausalLM")
    rope = {"rope_type": kind, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 12} if kind == "longrope" else {}
    model.config.max_position_embeddings = 48 if kind == "longrope" else 12
    model.config.rope_parameters = {"full_attention": rope} if by_layer_type else rope
    with pytest.raises(NotImplementedError, match=f"'{kind}' want sequences of at most 12 "):
        call_in_context(model, plan, input_ids=ids)
    assert call_in_context(model, plan, input_ids=ids[:, :12]).logits.shape[1] == 12

"""Models of transformers whose linear layers slipstream.integrations.transformers.patch changes."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from slipstream.integrations.class_mixers import FORWARDS
from slipstream.integrations.patching import CACHES
from tests.support.tiny_models import OTHERS, eager_runs, first_of_each_type

LENGTHS = (7, 2, 3)  # of packed sequences


def linear_classes() -> list[str]:
    """A language model of each file that looks functions up in other packages or has a class of
    FORWARDS, of causal ones the first of each type."""
    causal = set(first_of_each_type("MODEL_FOR_CAUSAL_LM_"))
    found: list[str] = []
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        looks_up = "use_kernel_func_from_hub_with_fallback(" in source
        if not looks_up and not any(f"class {x}(" in source for x in FORWARDS):
            continue
        names = re.findall(r"^class (\w+)\(", source, re.MULTILINE)
        found += [x for x in names if x in causal] or [
            x for x in names if x.endswith("ForConditionalGeneration")
        ]
    return sorted(found)


def tiny(name: str) -> tuple[Any, Any, Any, Any, Any]:
    """The class, its configuration, weights, inputs, and transformers' own results."""
    errors = []
    for other in OTHERS:
        try:
            return eager_runs(name, other)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def packed_inputs(told: str, ids: Tensor) -> dict[str, Tensor]:
    """One row of several sequences, with what transformers' collator says of them."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    given = {"input_ids": ids[:1], "position_ids": positions}
    if told == "seq_idx":
        which = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        given["seq_idx"] = which[None].int()
    elif told == "offsets":
        cuts = torch.tensor((0, *LENGTHS)).cumsum(0).int()
        given |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
        given |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return given


def alone(model: Any, ids: Tensor) -> Tensor:
    """Logits of the packed sequences, each in a row of its own."""
    return torch.cat([model(x, use_cache=False).logits for x in ids[:1].split(LENGTHS, 1)], 1)


def own_cache(model: Any) -> dict[str, Any]:
    """A cache to be filled, as an argument, of a model that returns none."""
    if not isinstance(model, transformers.RecurrentGemmaForCausalLM):
        return {}
    name = next(x for x in CACHES if x in inspect.signature(model.forward).parameters)
    return {name: transformers.DynamicCache(config=model.config)}


def next_cache(out: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The cache of a call, as an argument of the next; given: that of this call."""
    name = next((x for x in (*CACHES, "state") if x in out), None)
    return given if name is None else {name: out[name]}

"""transformers' models whose tokens are divided among processes, beside the whole rows in one."""

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor

from slipstream.integrations.context import call_in_context
from slipstream.integrations.transformers import NAME, patch
from slipstream.parallel import ContextParallel, shard
from tests.support.tiny_models import OTHERS, build, tiny_config

IGNORED = -100
MODELS = """
    Apertus Arcee Bamba Cohere Cohere2 DeepseekV3 Ernie4_5 Ernie4_5_Moe Exaone4 FalconH1
    Gemma Gemma2 Gemma3 Glm4 Glm4Moe Glm4MoeLite GptOss Granite GraniteMoe GraniteMoeHybrid
    Helium HunYuanDenseV1 KimiLinear Lfm2 Lfm2Moe Llama Ministral Mistral Mixtral NemotronH
    Olmo Olmo2 Olmo3 OlmoHybrid Olmoe Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next
    Qwen3_5 Qwen3_5Moe SmolLM3 Starcoder2 Zamba2
"""
NAMES = [f"{x}ForCausalLM" for x in MODELS.split()]
SEQUENCES, LENGTHS = (13, 0, 6, 5), (10, 14)


def make(name: str) -> Any:
    """A small model with our attention, the same in every process."""
    errors, cls = [], getattr(transformers, name)
    for other in OTHERS:
        try:
            config = tiny_config(cls.config_class, other)
            model = build(cls, config, NAME, None)
        except Exception as error:
            errors.append(error)
            continue
        patch(model)
        return model.train()
    raise errors[0]


def batch(packed: bool) -> tuple[Tensor, Tensor, list[int] | None]:
    """ids, the next tokens, and the offsets of packed sequences."""
    total = sum(SEQUENCES)
    ids = torch.arange(total).mul(7).remainder(50).add(5)[None]
    target = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], 1)
    if not packed:
        return ids, target, None
    offsets = [sum(SEQUENCES[:i]) for i in range(len(SEQUENCES) + 1)]
    target[:, [x - 1 for x in offsets[1:]]] = IGNORED
    return ids, target, offsets


def difference(name: str, packed: bool, checkpointed: bool) -> str:
    """The difference of two ranks from one, or ""."""
    whole, part = make(name), make(name)
    part.load_state_dict(whole.state_dict())
    ids, target, offsets = batch(packed)
    plan = ContextParallel(None, offsets, LENGTHS)
    count = (target != IGNORED).sum()
    # packed sequences each alone: some types attend to others where rows are packed
    cuts = [0, ids.shape[1]] if offsets is None else offsets
    want = torch.zeros(())
    for a, b in itertools.pairwise(cuts):
        if a < b:
            options = {"shift_labels": target[:, a:b], "num_items_in_batch": count}
            given = {"input_ids": ids[:, a:b], "labels": ids[:, a:b], "use_cache": False}
            want = want + whole(**given, **options).loss
    want.backward()
    if checkpointed:
        word = "activation" if hasattr(part, "activation_checkpointing_enable") else "gradient"
        getattr(part, f"{word}_checkpointing_enable")({"use_reentrant": False})
    mine = shard(ids, plan)
    loss = call_in_context(part, plan, input_ids=mine, labels=mine).loss
    loss.backward()
    found = [f"loss {plan.sum(loss)} instead of {want}"]
    if torch.allclose(plan.sum(loss), want, rtol=1e-4):
        found = []
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for (n, p), q in zip(part.named_parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            grad = torch.zeros_like(q.grad) if p.grad is None else p.grad
            off = float((plan.sum(grad) - q.grad).abs().max())
            if not off < 1e-4 * largest:
                found.append(f"{n} is off by {off:.1e} of {largest:.1e}")
    return "; ".join(found[:3])


def run_models(rank: int, names: list[str], checkpointed: bool, found: Any) -> None:
    for name in names:
        for packed in (False, True):
            wrong = difference(name, packed, checkpointed)
            if wrong:
                found.put(f"{name}, packed {packed}: {wrong}")

"""transformers' models whose tokens are divided among ranks: each calls the model with its own."""

from typing import Any

from torch import Tensor, nn

from slipstream.integrations.patching import patch
from slipstream.ops.loss import cross_entropy
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.runtime.token_ids import IGNORED

# Model types whose layers hand keyword arguments down to all that mixes tokens, and have nothing
# else that does; tests/integrations/test_context.py runs each.
TYPES = (
    "apertus", "arcee", "bamba", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "ernie4_5_moe",
    "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan_v1_dense", "kimi_linear", "lfm2", "lfm2_moe", "llama", "ministral", "mistral",
    "mixtral", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "smollm3", "starcoder2", "zamba2",
)  # fmt: skip
CHOICE = "_attn_implementation"


def call_in_context(
    model: nn.Module,
    context: ContextParallel,
    *,
    input_ids: Tensor,
    labels: Tensor | None = None,
    **options: Any,
) -> Any:
    """A model of transformers on this rank's tokens of a batch.

    Its linear layers are patched (patch), and its attention has to be "slipstream". Positions count
    in the whole sequence, the label after a rank's last token is the next rank's first, and the
    loss is divided by the labels that count on all ranks: the ranks' losses and gradients add up to
    the batch's. Every rank calls it.

    Args:
        model: for causal language modelling, of a type in TYPES.
        context: who has which tokens; or a PrefixTree, whose row one rank has.
        input_ids: [B, tokens here].
        labels: [B, tokens here], as input_ids, -100 where there is no loss.
        options: other arguments of the model; not attention_mask, position_ids, a cache or
            output_router_logits.

    Returns:
        What the model returns of these tokens.

    Raises:
        NotImplementedError: a type that is not known to exchange all that it has to; a rotary
            embedding whose angles depend on the length ("dynamic", "longrope"), and a sequence
            longer than the model was first trained with.
        ValueError: another attention; an argument that the context replaces.
    """
    config: Any = getattr(model, "config", None)
    kind, attention = getattr(config, "model_type", None), getattr(config, CHOICE, None)
    if kind not in TYPES:
        raise NotImplementedError(f"context: want a model of {', '.join(TYPES)}, got {kind}")
    if attention != "slipstream":
        raise ValueError(
            f"context: want attn_implementation='slipstream', which exchanges keys, got {attention}"
        )
    for name in ("attention_mask", "position_ids", "past_key_values", "cache", "use_cache"):
        if options.get(name) is not None and options[name] is not False:  # use_cache=False
            raise ValueError(f"{name}: want None with a context")
    routers = options.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if routers is None else routers:
        raise ValueError(
            "output_router_logits: want False with a context, where each rank has a part of the "
            "tokens that balance the experts"
        )
    patch(model)
    share = context.share(input_ids.shape[1])
    _expect_fixed_angles(config, share.longest)
    options |= {"use_cache": False, "position_ids": share.positions(input_ids.device)}
    if labels is None:
        return model(input_ids=input_ids, context=context, **options)
    target = share.next_tokens(labels, IGNORED).contiguous()
    count = context.sum((target != IGNORED).sum()).clamp(min=1)
    if isinstance(context, PrefixTree):
        out = model(input_ids=input_ids, context=context, **options)
        logits, target = share.predicting(out.logits).flatten(0, 1), target.flatten()
        out["loss"] = cross_entropy(logits, target, reduction="sum") / count
        return out
    options |= {"labels": labels, "shift_labels": target, "num_items_in_batch": count}
    return model(input_ids=input_ids, context=context, **options)


def _expect_fixed_angles(config: Any, longest: int) -> None:
    """Raises for angles that follow from the largest position of a call: ranks have other ones."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (given, *given.values()):  # of all layers, or of each kind of them
        if not isinstance(rope, dict):
            continue
        kind = str(rope.get("rope_type", rope.get("type")))
        if kind != "longrope" and "dynamic" not in kind:
            continue
        limits = rope, vars(config)
        limit = next((x for y in limits if (x := y.get("original_max_position_embeddings"))), None)
        if kind != "longrope" or limit is None:
            limit = config.max_position_embeddings
        if longest > limit:
            raise NotImplementedError(
                f"context: with rope_type={kind!r} want sequences of at most {limit} tokens, where "
                f"all ranks turn by the same angles, got {longest}"
            )

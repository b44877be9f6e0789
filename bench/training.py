"""A training step of whole models: loss and gradients, without the optimizer.

    python bench/training.py                    every case
    python bench/training.py --only Llama       beside torch's attention in transformers' own model
    python bench/training.py --only kda         a mixer of our language model, beside attention
    python bench/training.py --only checkpointed

Four layers, hidden size 2048 (Llama: as that of 8B parameters), bf16 weights, 8192 tokens. ms: of
the device, providers in turns; host_ms: until the step returns; peak_gib: beyond the weights.
packed: four sequences in a row, by position ids. checkpointed: 8 sequences of 4096 tokens, hidden
size 1024, 8 heads, beside the same model that keeps its activations. RetNet: the same sizes with
4 heads, whose values have 512 channels, beside 8.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from harness import (
    BF16,
    DEVICE,
    Call,
    Report,
    Row,
    checkpointed,
    first,
    host_us,
    language_model,
    parser,
    peak_bytes,
)
from torch import Tensor

from slipstream.models import MIXERS

LARGE = ("attention", "gated_deltanet", "kda", "gla", "rwkv7", "mamba2")
CHECKPOINTED = [f"{mixer} checkpointed" for mixer in MIXERS]
CASES = (*LARGE, "Llama", "Llama packed", "RetNet", *CHECKPOINTED)
TOKENS = 8192


def step(model: Any, ids: Tensor, **inputs: Tensor) -> Call:
    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss.backward()

    return run


def llama(small: bool) -> Any:
    import transformers

    import slipstream.integrations.transformers  # noqa: F401

    sizes: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    if small:
        sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model.to(DEVICE, BF16 if DEVICE.type == "cuda" else torch.float32)


def steps(name: str, report: Report) -> dict[str, Call]:
    """By provider."""
    small = report.options.small
    tokens = 64 if small else TOKENS
    shape = (8, tokens // 2) if name in ("RetNet", *CHECKPOINTED) else (1, tokens)
    ids = torch.randint(1, 64 if small else 32000, shape, device=DEVICE)

    def ours(mixer: str, layers: int = 4, **sizes: int) -> Any:
        return language_model([mixer] * (1 if small else layers), small, **sizes).train()

    if name in CHECKPOINTED:
        model = ours(name.split()[0], hidden_size=1024, num_heads=8)
        return {
            "kept": step(model, ids),
            "checkpointed": step(checkpointed(copy.deepcopy(model)), ids),
        }
    if name == "RetNet":
        return {
            f"{n} heads": step(ours("retention", hidden_size=1024, num_heads=n), ids)
            for n in (8, 4)
        }
    if not name.startswith("Llama"):
        return {"slipstream": step(ours(name), ids)}
    inputs = {}
    if name.endswith("packed"):
        inputs["position_ids"] = (torch.arange(tokens, device=DEVICE) % (tokens // 4))[None]
    found, model = {}, llama(small)
    for who in ("slipstream", "sdpa"):
        mine = copy.deepcopy(model)
        mine.set_attn_implementation(who)
        found[who] = step(mine, ids, **inputs)
    return found


def rows(name: str, report: Report) -> Iterable[Row]:
    """A row a provider."""
    calls = steps(name, report)
    rows: dict[str, dict[str, object]] = {}
    for who, call in calls.items():
        rows[who] = {"model": name, "who": who, "first_s": round(first(call), 2)}
        rows[who]["peak_gib"] = round(peak_bytes(call) / 2**30, 2)
    tokens = 4 * TOKENS if name in ("RetNet", *CHECKPOINTED) else TOKENS
    for who, ms in report.times(calls, 7).items():
        host = host_us(calls[who], report.runs(5), 1) / 1e3
        rows[who] |= {"ms": round(ms, 2), "host_ms": round(host, 2)}
        rows[who]["tokens/s"] = round(1e3 * tokens / ms)
    return rows.values()


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    report.measure((name, "training", partial(rows, name, report)) for name in CASES)


if __name__ == "__main__":
    main()

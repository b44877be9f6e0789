"""Two layers of Qwen3.8-Flash-Next's widths through patch(), beside transformers' own.

    python bench/selected_model.py [--only 'step 16384'] [--seconds 150]

One layer of the gated delta rule and one of QSA (24 query heads on 2, 256 wide, 512 blocks of 4
keys of 4 index heads), 2,048 features, 16 of 512 experts (10 a token), 32,768 words, bf16, the
indexer trained where it is patched. step: forward and backward of one row; its own first steps are
not timed, its length is one that fits the time. prefill: no gradients, the last token's logits;
linear: the same without the second layer.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from harness import DEVICE, Measurement, Report, parser, peak_bytes, synchronize
from torch import nn

WIDTHS: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 16,
    "num_experts_per_tok": 10, "vocab_size": 32768, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "hc_lowrank": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64, "indexer_head_dim": 16,
    "indexer_budget": 16,
}  # fmt: skip
LINEAR, INDEXED = "linear_attention", "full_attention"
# what is run, tokens, whose, layers, runs
CASES = (
    ("prefill", 65536, "patched", (LINEAR, INDEXED), 5),
    ("prefill", 65536, "patched", (LINEAR,), 5),
    ("step", 16384, "patched", (LINEAR, INDEXED), 5),
    ("step", 2048, "patched", (LINEAR, INDEXED), 5),
    ("step", 2048, "transformers", (LINEAR, INDEXED), 1),
    ("step", 16384, "transformers", (LINEAR, INDEXED), 1),
)


def model_of(layers: tuple[str, ...], small: bool) -> Any:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sizes = WIDTHS | (SMALL if small else {})
    config = Qwen4ExpTextConfig(
        **sizes, num_hidden_layers=len(layers), layer_types=[*layers], rope_parameters=rope
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    with DEVICE:
        model = Qwen4ExpForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


@torch.no_grad()
def prefill(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def row(
    report: Report, what: str, T: int, who: str, layers: tuple[str, ...], runs: int
) -> Mapping[str, object]:
    from slipstream.integrations.transformers import patch, train_indexers, unpatch

    T = 48 if report.options.small else T
    (patch if who == "patched" else unpatch)()
    model = model_of(layers, report.options.small).train(what == "step")
    if who == "patched":
        train_indexers(model)
    call = {"step": step, "prefill": prefill}[what]
    ids = torch.randint(64 if report.options.small else WIDTHS["vocab_size"], (1, T))
    ids = ids.to(DEVICE)
    cells = {"what": what, "T": T, "who": who, "layers": len(layers)}
    call(model, ids if runs > 1 else ids[:, :256])
    call(model, ids if runs > 1 else ids[:, :256])
    if report.options.once:
        return cells
    taken = []
    for _ in range(runs):
        synchronize()
        start = time.perf_counter()
        result = call(model, ids)
        synchronize()
        taken.append((time.perf_counter() - start) * 1e3)
    cells["ms"] = f"{sorted(taken)[runs // 2]:.4g}"
    if runs > 1:
        cells["peak_GiB"] = f"{peak_bytes(lambda: call(model, ids)) / 2**30:.3f}"
    return cells | {"loss": f"{float(result):.4f}" if what == "step" else ""}


def measurements(report: Report) -> Iterator[Measurement]:
    for what, T, who, layers, runs in CASES:
        run = partial(row, report, what, T, who, layers, runs)
        yield f"{what} {T} {who} {len(layers)}", "selected_model", run


def main(argv: list[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    report.measure(measurements(report))


if __name__ == "__main__":
    main()

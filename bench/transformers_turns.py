"""transformers' models as they are and on slipstream, in turns in one process.

    python bench/transformers_turns.py                     four layers of models that patch() takes
    python bench/transformers_turns.py --only "mamba|zaya"
    python bench/transformers_turns.py --classes FILE      tiny models of the classes in FILE

own: plain torch with attn_implementation="sdpa", or "eager" where a class lacks it. ours:
slipstream.integrations.transformers.patch() and attn_implementation="slipstream". Both have run
before; patch() and unpatch() stand between them. ms, medians of five: a training step of a row of
2,048 tokens, a prompt of as many with a cache, a token of generate for 1 and 16 rows. A tiny
model's (tests/support/tiny_models.py, 2 rows of 96 tokens) are those of the host.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers_models as models
from harness import BF16, DEVICE, Report, first, parser

_LAYERS: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
_GATED: dict[str, Any] = {
    **_LAYERS, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_HEADS = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128}
_MAMBA = {"hidden_size": 1024, "num_hidden_layers": 4}
MODELS = {
    **models.MODELS,
    "llama": ("Llama", _LAYERS),
    "qwen3_5": ("Qwen3_5", _GATED),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**_GATED, "linear_num_value_heads": 8, "linear_key_head_dim": 96,
         "linear_value_head_dim": 192},
    ),
    "mamba": ("Mamba", {**_MAMBA, "state_size": 16}),
    "falcon_mamba": ("FalconMamba", {**_MAMBA, "state_size": 16}),
    "mamba2": (
        "Mamba2", {**_MAMBA, "num_heads": 32, "head_dim": 64, "n_groups": 8, "state_size": 128},
    ),
    "bamba": ("Bamba", {**_LAYERS, **_HEADS, "attn_layer_indices": [3]}),
    "falcon_h1": ("FalconH1", {**_LAYERS, **_HEADS, "mamba_d_ssm": 2048}),
    "jamba": (
        "Jamba",
        {**_LAYERS, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 4,
         "attn_layer_offset": 3},
    ),
}  # fmt: skip
WAYS = {"own": "torch", "ours": "patched"}
ROWS = {1: "token", 16: "token, 16 rows"}
TOKENS = 16  # decoded
Call = Callable[[], Any]


def use(way: str) -> None:
    from slipstream.integrations.transformers import patch, unpatch

    (patch if way == "ours" else unpatch)()


def medians(calls: Mapping[str, Call], runs: int = 5) -> dict[str, float]:
    """Milliseconds by way, in turns, each of them once before."""
    found: dict[str, list[float]] = {way: [] for way in calls}
    for run in range(runs + 1):
        for way in list(calls)[:: 1 if run % 2 else -1]:
            use(way)
            found[way].append(1e3 * first(calls[way]))
    return {way: statistics.median(x[1:]) for way, x in found.items()}


def row(name: str, what: str, calls: Mapping[str, Call], **more: Any) -> dict[str, Any]:
    import transformers

    times = {f"{way} ms": round(ms, 3) for way, ms in medians(calls).items()}
    return {"model": name, "what": what, **times, "transformers": transformers.__version__, **more}


def token(name: str, what: str, generate: Mapping[str, Callable[[int], Any]], **more: Any) -> Any:
    """One of generate's, by what more of them take."""
    made = {
        count: medians({w: partial(f, count) for w, f in generate.items()})
        for count in (TOKENS + 1, 1)
    }
    cells = row(name, what, {}, **more)
    for way in generate:
        cells[f"{way} ms"] = round((made[TOKENS + 1][way] - made[1][way]) / TOKENS, 3)
    return cells


def of_model(kind: str, small: bool) -> Iterator[dict[str, Any]]:
    models.MODELS.update(MODELS)
    made = {}
    for way, name in WAYS.items():
        use(way)
        with DEVICE:
            dtype = torch.float32 if DEVICE.type == "cpu" else BF16
            layers = models.FOUR_LAYERS.get(kind, {})
            made[way] = models.model_of(kind, name, small, dtype, **layers)
    made["ours"].load_state_dict(made["own"].state_dict())
    tokens = 32 if small else 2048
    steps = {way: models.Training(model, tokens).step for way, model in made.items()}
    yield row(kind, "step", steps)
    for model in made.values():
        model.eval()
    ids = torch.randint(3, models.vocabulary(made["own"]), (1, tokens), device=DEVICE)
    prompt = {w: torch.no_grad()(partial(m, ids, use_cache=True)) for w, m in made.items()}
    yield row(kind, "prompt", prompt)
    for B, what in ROWS.items():
        ids = models.prompts(made["own"], B)
        yield token(kind, what, {w: partial(models.generate, m, ids) for w, m in made.items()})


def of_class(name: str) -> Iterator[dict[str, Any]]:
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support import tiny_models as tiny

    tiny.TOKENS = 96
    cls = getattr(transformers, name)
    mapping = tiny.classes()[name][1]
    config = tiny.tiny_config(tiny.config_class(cls), {})
    own = "sdpa" if cls._supports_sdpa else "eager"
    made = {
        way: tiny.build(cls, config, impl, None).to(DEVICE, BF16)
        for way, impl in (("own", own), ("ours", "slipstream"))
    }
    given = tiny.inputs_of(made["own"], config)
    inputs: Any = {
        k: x.to(DEVICE, BF16 if x.is_floating_point() else x.dtype) for k, x in given.items()
    }

    def step(model: Any) -> None:
        outputs = [x for _, x in tiny.tensors_of(model(**inputs)) if x.requires_grad]
        torch.stack([x.float().sum() for x in outputs]).sum().backward()
        model.zero_grad()

    more = {"mapping": mapping.removesuffix("_MAPPING_NAMES").lower(), "attention": own}
    forward = {way: torch.no_grad()(partial(model, **inputs)) for way, model in made.items()}
    yield row(name, "prompt", forward, **more)
    yield row(name, "step", {way: partial(step, model) for way, model in made.items()}, **more)
    if made["own"].can_generate() and list(inputs) == ["input_ids"]:
        ids = inputs["input_ids"][:, :64]
        calls = {w: partial(models.generate, m, ids) for w, m in made.items()}
        yield token(name, "token", calls, **more)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--classes", type=Path, help="a file of names, one a line")
    given = options.parse_args(arguments)
    report = Report(given)
    models.prepare("torch")
    work: Any = [(x, "transformers_turns", partial(of_model, x, given.small)) for x in MODELS]
    if given.classes:
        names = given.classes.read_text().split()
        work = [(x, "transformers_classes", partial(of_class, x)) for x in names]
    try:
        report.measure(work)
    finally:
        use("own")
        for package in models.PEERS:
            del sys.modules[package]


if __name__ == "__main__":
    main()

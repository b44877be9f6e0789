"""Decoding: one token for each sequence, with a state that is updated in place; and hgrn's scan.

    python bench/decode.py                    beside fla, where it is installed
    python bench/decode.py --only 'step kda'  or scan
    python bench/decode.py --only generate    generate of whole models, with and without graphs
    python bench/decode.py --only mixer       mixers' steps with the heads of a GPU, beside a copy
    python bench/decode.py --only verify      drafts by mixer_step, and by states after each token
    python bench/decode.py --only prompts     many short prompts in a call, beside fla
    python bench/decode.py --only drafts      two models trained here: drafts of the smaller one

Milliseconds of a CUDA graph, so without the host's time, and with what the L2 cache holds from the
step before. The state is read and written once: of copy is that part of the bandwidth of a copy.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import decode_drafts
import torch
from decode_serving import works as serving_works
from harness import (
    BF16,
    DEVICE,
    Call,
    Measurement,
    Provider,
    Report,
    bandwidth,
    first,
    graph_ms,
    host_us,
    in_turns,
    language_model,
    parser,
)
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import Shape, chosen

# operator, B, H, HV, V, state V-first
STEPS = [
    *(("gated_delta_rule", B, 16, 32, 128, False) for B in (1, 8, 64, 256)),
    *(("gated_delta_rule", B, 16, 32, 128, True) for B in (64, 256)),
    ("kda", 64, 32, 32, 128, False),
    ("rwkv7", 64, 32, 32, 128, False),
    ("retention", 64, 16, 16, 128, False),
    # what tensor parallelism over 2 to 8 GPUs leaves a GPU of Qwen3-Next and Kimi Linear, and over
    # 1 to 8 of Nemotron-H of 8 B
    *(("gated_delta_rule", 64, 16 // n, 32 // n, 128, False) for n in (2, 4, 8)),
    *(("kda", 64, 32 // n, 32 // n, 128, False) for n in (2, 4, 8)),
    *(("simple_gla", 64, 8 // n, 128 // n, 64, False) for n in (1, 2, 4, 8)),
]
# of an operator's arguments, what recurrent_step calls them
NAMES = {"r": "q", "w": "g", "gk": "g"}
SCANS = [(1, 8192, 2048), (8, 2048, 1024), (1, 65536, 1024), (64, 128, 1024)]  # B, T, D
# mixers of whole models
GENERATED = ("gated_deltanet", "kda", "gla", "mamba2", "rwkv7", "retention", "attention")
# of a mixer another way to generate: options of the config, and of generate
WAYS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("gated_deltanet", "consistent", {"consistent": True}, {}),
    ("attention", "consistent", {"consistent": True}, {}),
    ("attention", "int8 keys", {}, {"cache_config": {"key_dtype": "int8"}}),
    ("gated_deltanet", "drafts of the prompt", {}, {"prompt_lookup_num_tokens": 4}),
    ("gated_deltanet", "drafts of a model", {}, {"assistant_model": True}),
]


def arguments(
    name: str, B: int, T: int, H: int, HV: int, report: Report, V: int = 128
) -> dict[str, Tensor]:
    """Arguments of an operator, without its state, called as recurrent_step does."""
    sample = chosen([f"fused_recurrent_{name}"])[0]
    shape = report.shape(Shape(B=B, T=T, H=H, HV=HV, V=V, dtype=BF16))
    args = {NAMES.get(n, n): x for n, x in sample.inputs(shape, DEVICE).items()}
    if name == "retention":
        heads = torch.arange(shape.HV or shape.H, device=DEVICE)
        args["g"] = torch.log1p(-torch.exp2(-5.0 - heads)).expand(shape.B, shape.T, -1)
    return args


def step(
    name: str, B: int, H: int, HV: int, V: int, v_first: bool, report: Report
) -> tuple[Call, float]:
    """The call, on a pool of states with some slots to spare, and the bytes that it must move."""
    args = arguments(name, B, 1, H, HV, report, V)
    rows, _, heads, V = args["v"].shape
    K = args["k"].shape[-1]
    size = (rows + 3, heads, V, K) if v_first else (rows + 3, heads, K, V)
    pool = torch.randn(size, device=DEVICE)
    at = torch.randperm(rows + 3, device=DEVICE)[:rows].int()
    options: dict[str, Any] = {"state": pool, "state_indices": at, "state_v_first": v_first}
    call = partial(ops.recurrent_step, **args, **options)
    return torch.no_grad()(call), 2.0 * rows * heads * K * V * 4


def fla_step(B: int, report: Report) -> tuple[Call, float]:
    module = importlib.import_module("fla.ops.gated_delta_rule")
    args = arguments("gated_delta_rule", B, 1, 16, 32, report)
    rows, _, heads, V = args["v"].shape
    state = torch.randn(rows, heads, args["k"].shape[-1], V, device=DEVICE)
    options = {"initial_state": state, "output_final_state": True}
    call = partial(module.fused_recurrent_gated_delta_rule, **args, **options)
    return torch.no_grad()(call), 2.0 * state.nbytes


def step_row(
    what: str, shape: str, make: Callable[[Report], tuple[Call, float]], report: Report
) -> Mapping[str, object]:
    call, moved = make(report)
    cold = first(call)
    if report.options.once:
        return {"what": what, "shape": shape}
    row = {"what": what, "shape": shape, **bandwidth(graph_ms(call, report.runs(20)), moved)}
    row["first s"] = round(cold, 2)
    flushed = in_turns({"": call}, report.runs(20))[""]
    rounds = report.runs(10)
    return row | {"flushed ms": round(flushed, 5), "host us": round(host_us(call, rounds), 1)}


def scan_rows(
    label: str, fn: Callable[..., Any], size: tuple[int, int, int], report: Report
) -> list[Mapping[str, object]]:
    """Forward reads x and g and writes h; backward reads g, h and dh and writes dx and dg."""
    B, T, D = size
    shape = report.shape(Shape(B=B, T=T, D=D))
    provider = Provider(fn, chosen(["chunk_hgrn"])[0].inputs(shape, DEVICE))
    name, elements = f"B{B} T{T} D{D}", provider.args["x"].numel()
    found = []
    for way, call, each in (("fwd", provider.forward, 8.0), ("fwd+bwd", provider.gradients, 22.0)):
        cold = first(call)
        for ms in report.times({"": call}).values():
            row = {"what": f"{label} {way}", "shape": name, **bandwidth(ms, each * elements)}
            found.append(row | {"first s": round(cold, 2)})
    return found


def generates(model: Any, B: int, tokens: int, **options: Any) -> Call:
    """Greedy generation of the given number of tokens for B prompts of 16 tokens."""
    ids = torch.randint(1, model.config.vocab_size, (B, 16), device=DEVICE)
    options |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    return partial(model.generate, ids, attention_mask=mask, max_new_tokens=tokens, **options)


@torch.no_grad()
def draft_of(model: Any, small: bool, **sizes: Any) -> Any:
    """A model of its first layers, a fifth of all. The others are made to add nothing, so that all
    drafts are right: how fast a generate with an assistant can be."""
    layers = model.model.layers
    count = max(len(layers) // 5, 1)
    for block in layers[count:]:
        block.mixer.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    draft = language_model(model.config.mixers[:count], small, **sizes).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


def generate_row(
    mixer: str, B: int, way: str, config: dict[str, Any], given: dict[str, Any], report: Report
) -> Mapping[str, object]:
    """Tokens/s of a model of about 0.35 B, its steps as they are written and as a graph."""
    small = report.options.small
    # heads of 128, but gla's values of 256
    sizes = {"hidden_size": 1024, "num_heads": 4 if mixer == "gla" else 8, **config}
    model = language_model([mixer] * (2 if small else 24), small, **sizes).eval()
    if "assistant_model" in given:
        given = {"assistant_model": draft_of(model, small, **sizes)}
    speeds = {}
    for name, enabled in (("eager", False), ("graph", True)):
        model.decoding.enabled = enabled
        tokens = report.runs(128 if enabled else 16)
        call = generates(model, B, tokens, **given)
        first(call)
        speeds[f"{name} tokens/s"] = round(B * tokens / first(call), 1)
    counts = {"captures": model.decoding.captures, "replays": model.decoding.replays}
    return {"mixer": mixer, "way": way, "B": B, **speeds, **counts}


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    steps: list[tuple[str, str, Callable]] = []
    for name, B, H, HV, V, v_first in STEPS:
        shape = f"B{B} H{H} HV{HV}{'' if V == 128 else f' V{V}'}{' V first' if v_first else ''}"
        steps.append((f"step {name}", shape, partial(step, name, B, H, HV, V, v_first)))
    scans = [("hgrn", ops.chunk_hgrn)]
    try:
        hgrn = importlib.import_module("fla.ops.hgrn")
        scans += [(f"fla {x}", getattr(hgrn, x)) for x in ("fused_recurrent_hgrn", "chunk_hgrn")]
        for B in (1, 64, 256):
            steps.append(("fla step gated_delta_rule", f"B{B} H16 HV32", partial(fla_step, B)))
    except ImportError as e:
        print(e)
    works: list[Measurement] = []
    for what, shape, make in steps:
        measure = partial(step_row, what, shape, make, report)
        works.append((f"{what} {shape}", "step_gpu", measure))
    if not report.options.once:
        plain = [(mixer, "", {}, {}) for mixer in GENERATED]
        for (mixer, way, *given), B in product([*plain, *WAYS], (1, 64)):
            if B == 1 or "drafts" not in way:  # transformers drafts for one sequence
                measure = partial(generate_row, mixer, B, way, *given, report)
                works.append((f"generate {mixer} {way} B{B}", "generate_gpu", measure))
    for (label, fn), size in product(scans, SCANS):
        measure = partial(scan_rows, label, fn, size, report)
        works.append((f"scan {label} {size}", "step_gpu", measure))
    files = {"step": "step_gpu", "prompts": "prompts_gpu"}
    works += [(name, files[kind], measure) for name, kind, measure in serving_works(report)]
    if not report.options.once:
        works.append(("drafts", "drafts_gpu", partial(decode_drafts.rows, report)))
    report.measure(works)


if __name__ == "__main__":
    main()

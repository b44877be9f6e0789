"""Decoding: one token for each sequence, with a state that is updated in place; and hgrn's scan.

    python bench/decode.py                    beside fla, where it is installed
    python bench/decode.py --only 'step kda'  or scan, boundary
    python bench/decode.py --only generate    generate of whole models, with and without graphs
    python bench/decode.py --cpu              generate on this CPU, beside transformers' Llama
    python bench/decode.py --tiles            tiles of the step

Milliseconds of a CUDA graph, so without the host's time, and with what the L2 cache holds from the
step before. The state is read and written once: of copy is that part of the bandwidth of a copy.
boundary: where walking token by token stops being faster than chunks.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from harness import (
    BF16,
    DEVICE,
    Call,
    Provider,
    Report,
    copy_bytes_per_ms,
    first,
    graph_ms,
    host_us,
    in_turns,
    parser,
)
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import Shape, chosen

# operator, B, H, HV, state V-first
STEPS = [
    ("gated_delta_rule", 1, 16, 32, False),
    ("gated_delta_rule", 8, 16, 32, False),
    ("gated_delta_rule", 64, 16, 32, False),
    ("gated_delta_rule", 256, 16, 32, False),
    ("gated_delta_rule", 64, 16, 32, True),
    ("gated_delta_rule", 256, 16, 32, True),
    ("kda", 64, 32, 32, False),
    ("rwkv7", 64, 32, 32, False),
    ("retention", 64, 16, 16, False),
]
# of an operator's arguments, what recurrent_step calls them
NAMES = {"r": "q", "w": "g", "gk": "g"}
SCANS = [(1, 8192, 2048), (8, 2048, 1024), (1, 65536, 1024), (64, 128, 1024)]  # B, T, D
# mixers of whole models
GENERATED = ("gated_deltanet", "kda", "gla", "mamba2", "rwkv7", "retention", "attention")
BOUNDARY = ("gated_delta_rule", "retention", "kda")


def cells(what: str, shape: str, ms: float, moved: float, first_s: float) -> dict[str, object]:
    fraction = moved / ms / copy_bytes_per_ms()
    return {
        "what": what,
        "shape": shape,
        "ms": round(ms, 5),
        "TB/s": round(moved / ms / 1e9, 3),
        "of copy": round(fraction, 3),
        "first s": round(first_s, 2),
    }


def arguments(name: str, B: int, T: int, H: int, HV: int, report: Report) -> dict[str, Tensor]:
    """Of an operator, without its state, called as recurrent_step does."""
    sample = chosen([f"fused_recurrent_{name}"])[0]
    shape = report.shape(Shape(B=B, T=T, H=H, HV=HV, dtype=BF16))
    args = {NAMES.get(n, n): x for n, x in sample.inputs(shape, DEVICE).items()}
    if name == "retention":
        heads = torch.arange(shape.HV or shape.H, device=DEVICE)
        args["g"] = torch.log1p(-torch.exp2(-5.0 - heads)).expand(shape.B, shape.T, -1)
    return args


def step(name: str, B: int, H: int, HV: int, v_first: bool, report: Report) -> tuple[Call, float]:
    """The call, on a pool of states with some slots to spare, and the bytes that it must move."""
    args = arguments(name, B, 1, H, HV, report)
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
    row = cells(what, shape, graph_ms(call, report.runs(20)), moved, cold)
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
    for way, call, each in (
        ("fwd", provider.forward, 8.0),
        ("fwd+bwd", provider.gradients, 22.0),
    ):
        cold = first(call)
        if not report.options.once:
            ms = in_turns({"": call}, report.runs(20))[""]
            found.append(cells(f"{label} {way}", name, ms, each * elements, cold))
    return found


def boundary(name: str, report: Report) -> None:
    line = []
    for T in (16, 32, 64, 128, 256):
        args = arguments(name, 1, T, 16, 32, report)
        args = args if name != "retention" else {n: args[n] for n in "qkv"}
        us = []
        for way in ("fused_recurrent", "chunk"):
            call = torch.no_grad()(partial(getattr(ops, f"{way}_{name}"), **args))
            first(call)
            us.append(1e3 * graph_ms(call, report.runs(20)))
        line.append(f"T{T} {us[0]:.0f} / {us[1]:.0f}")
    print(f"boundary {name}, us token by token / by chunks:", ", ".join(line), flush=True)


def tiles(report: Report) -> None:
    from slipstream.kernels.linear.triton import decode_launch

    kept = decode_launch.TILES[128]
    tries = [(16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8), (128, 16)]
    for B, v_first in ((1, False), (64, False), (64, True)):
        call, _ = step("gated_delta_rule", B, 16, 32, v_first, report)
        line = []
        for tile in [tuple(vars(kept).values())] + tries[: 1 if report.options.small else None]:
            decode_launch.TILES[128] = decode_launch.DecodeTile(*tile)
            line.append(f"{tile} {1e3 * graph_ms(call, report.runs(20)):.1f}")
        decode_launch.TILES[128] = kept
        print(f"step B{B} V first {v_first}, us:", ", ".join(line), flush=True)


def language_model(mixers: list[Any], sizes: dict[str, Any]) -> Any:
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    made: Any = SlipstreamForCausalLM(SlipstreamConfig(mixers=mixers, num_heads=4, **sizes))
    return made.to(DEVICE, BF16 if DEVICE.type == "cuda" else torch.float32).eval()


def generates(model: Any, B: int, tokens: int, vocab_size: int) -> Call:
    """Greedy generation of the given number of tokens for B prompts of 16 tokens."""
    ids = torch.randint(1, vocab_size, (B, 16), device=DEVICE)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    return partial(model.generate, ids, attention_mask=mask, max_new_tokens=tokens, **options)


def generate_row(mixer: str, B: int, report: Report) -> Mapping[str, object]:
    """Tokens/s of a model of about 0.35 B, its steps as they are written and as a graph."""
    small = report.options.small
    sizes = {"vocab_size": 64 if small else 32000, "hidden_size": 32 if small else 1024}
    model = language_model([mixer] * (1 if small else 24), sizes)
    speeds = {}
    for way, enabled in (("eager", False), ("graph", True)):
        model.decoding.enabled = enabled
        tokens = report.runs(128 if enabled else 16)
        call = generates(model, B, tokens, sizes["vocab_size"])
        first(call)
        speeds[f"{way} tokens/s"] = round(B * tokens / first(call), 1)
    counts = {"captures": model.decoding.captures, "replays": model.decoding.replays}
    return {"mixer": mixer, "B": B, **speeds, **counts}


def cpu_rows(report: Report) -> list[Mapping[str, object]]:
    """Tokens/s at batch 1 of 4 layers of width 256, in turns, and their ratio to Llama's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 4}
    models: dict[str, Any] = {"llama": LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()}
    for mixer in GENERATED:
        models[mixer] = language_model([mixer] * 4, sizes)
    tokens = report.runs(64)
    calls = {name: generates(m, 1, tokens, sizes["vocab_size"]) for name, m in models.items()}
    ms = in_turns(calls, report.runs(7))
    found = []
    for name, x in ms.items():
        speed, ratio = round(1e3 * tokens / x, 1), round(ms["llama"] / x, 2)
        found.append({"mixer": name, "tokens/s": speed, "of Llama's": ratio})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tiles", action="store_true", help="other tiles of the step")
    options.add_argument("--cpu", action="store_true", help="generate on this CPU")
    given = options.parse_args(argv)
    report = Report(given, needs_gpu=not given.cpu)
    if given.cpu:
        for row in cpu_rows(report):
            report.row("generate_cpu", row)
        return
    if given.tiles:
        tiles(report)
        return
    steps: list[tuple[str, str, Callable]] = []
    for name, B, H, HV, v_first in STEPS:
        shape = f"B{B} H{H} HV{HV}{' V first' if v_first else ''}"
        steps.append((f"step {name}", shape, partial(step, name, B, H, HV, v_first)))
    scans = [("hgrn", ops.chunk_hgrn)]
    try:
        hgrn = importlib.import_module("fla.ops.hgrn")
        scans += [(f"fla {x}", getattr(hgrn, x)) for x in ("fused_recurrent_hgrn", "chunk_hgrn")]
        for B in (1, 64, 256):
            steps.append(("fla step gated_delta_rule", f"B{B} H16 HV32", partial(fla_step, B)))
    except ImportError as e:
        print(e)
    for what, shape, make in steps:
        if report.wants(f"{what} {shape}"):
            with report.going_on(f"{what} {shape}"):
                report.row("step_gpu", step_row(what, shape, make, report))
    for mixer, B in product(GENERATED, (1, 64)):
        if report.wants(f"generate {mixer} B{B}") and not given.once:
            with report.going_on(f"generate {mixer} B{B}"):
                report.row("generate_gpu", generate_row(mixer, B, report))
    for label, fn in scans:
        for size in SCANS:
            if report.wants(f"scan {label} {size}"):
                with report.going_on(f"scan {label} {size}"):
                    for row in scan_rows(label, fn, size, report):
                        report.row("step_gpu", row)
    for name in BOUNDARY:
        if report.wants(f"boundary {name}") and not given.once:
            with report.going_on(f"boundary {name}"):
                boundary(name, report)
    report.end()


if __name__ == "__main__":
    main()

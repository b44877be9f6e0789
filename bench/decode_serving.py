"""An engine's calls, for decode.py: mixers, drafts, short prompts."""

import importlib
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from harness import BF16, DEVICE, Call, Report, copy_bytes_per_ms, error, first, in_graph, rounded
from torch import Tensor

from slipstream import ops
from slipstream.integrations import serving
from slipstream.runtime.backends import HAVE_TRITON

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla would call FlashQLA where that is installed
Row = Mapping[str, object]
K = 128
COLD_BYTES = 256 << 20  # of the states of all calls in a graph: more than the L2 cache holds
# of whole models: mixer, heads of q and of v, V
MIXERS = {
    "Qwen3-Next": ("gated_deltanet", 16, 32, 128),
    "Kimi-Linear": ("kda", 32, 32, 128),
    "Nemotron-H": ("mamba2", 8, 128, 64),
}
GPUS = (1, 2, 4, 8)
DRAFTS = 4
# sequences of 1 to 256 tokens: how many
PROMPTS = (4, 8, 16, 32)
_RAW = {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "norm_eps": 1e-6}
OPTIONS: dict[str, dict[str, Any]] = {
    "gated_deltanet": _RAW,
    "kda": {**_RAW, "z_activation": "sigmoid"},
    "mamba2": {
        "channel_order": "vkq",
        "dt_scales_v": True,
        "scale": 1.0,
        "norm_before_gate": False,
        "norm_eps": 1e-5,
    },
}


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype if DEVICE.type == "cuda" else torch.float32)


def few(count: int, report: Report) -> int:
    """At most two for --small."""
    return min(count, 2) if report.options.small else count


def pools(B: int, each: int, report: Report) -> tuple[int, list[Tensor]]:
    """How many calls a graph has, and the slots of each: all states have left the cache by then."""
    calls = 1 if report.options.small else max(2, -(-COLD_BYTES // (B * each)))
    return calls, list(torch.randperm(calls * B, device=DEVICE).int().split(B))


def one_after_another(calls: list[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return in_graph(run)


def mixer_row(model: str, gpus: int, B: int, report: Report) -> Row:
    """A token of one GPU's heads, beside a copy of as many bytes, each in a graph of many."""
    kind, H, HV, V = MIXERS[model]
    B, gpus = few(B, report), 8 if report.options.small else gpus
    H, HV = H // gpus, HV // gpus
    C, each = 2 * H * K + HV * V, 4 * HV * K * V
    count, slots = pools(B, each, report)
    state = torch.randn(count * B, HV, K, V, device=DEVICE)
    given: dict[str, Any] = {
        "conv_state": normal(count * B, C, 4),
        "conv_weight": normal(C, 4),
        "z": normal(B, 1, HV, V),
        "A_log": torch.rand(HV, device=DEVICE).log(),
        "norm_weight": torch.ones(V, device=DEVICE),
        **OPTIONS[kind],
    }
    gate = (HV, K) if kind == "kda" else (HV,)
    given |= {"g": normal(B, 1, *gate), "dt_bias": torch.randn(gate, device=DEVICE)}
    if kind == "mamba2":
        given |= {"D": torch.ones(HV, device=DEVICE), "norm_group_size": HV // H * V}
        given["norm_weight"] = torch.ones(HV, V, device=DEVICE)
    else:
        given["beta"] = normal(B, 1, HV)
    q, k, v = normal(B, 1, H, K), normal(B, 1, H, K), normal(B, 1, HV, V)
    step = torch.no_grad()(partial(ops.mixer_step, q, k, v, state=state, **given))
    source, target = (torch.zeros(B * each // 4 * count, device=DEVICE) for _ in range(2))
    copies: list[Call] = [
        partial(y.copy_, x) for x, y in zip(source.chunk(count), target.chunk(count), strict=True)
    ]
    calls = {"mixer": one_after_another([partial(step, state_indices=x) for x in slots])}
    calls["copy"] = one_after_another(copies)
    ms = {name: x / count for name, x in report.times(calls).items()}
    shape = f"{model} on {gpus}, B{B} H{H} HV{HV}{'' if V == K else f' V{V}'}"
    row: dict[str, object] = {"what": f"mixer {kind}", "shape": shape}
    if not ms:
        return row
    row |= {"ms": round(ms["mixer"], 5), "TB/s": round(2e-9 * B * each / ms["mixer"], 3)}
    return row | {"of copy": round(ms["copy"] / ms["mixer"], 3)}


def verify_row(B: int, H: int, HV: int, report: Report) -> Row:
    """DRAFTS tokens of the gated delta rule by mixer_step, which runs the last call's tokens once
    more, and by a kernel that leaves the state after each; of which one is copied, or found by its
    index in the next call."""
    from snapshots import accept, verify  # Triton's, as in engines

    each = 4 * HV * K * K
    slots = torch.randperm(B + 3, device=DEVICE)[:B].int()
    state = torch.randn(B + 3, HV, K, K, device=DEVICE)
    kept = torch.empty(B, DRAFTS, HV, K, K, device=DEVICE)
    q, k, v = normal(B, 2 * DRAFTS, H, K), normal(B, 2 * DRAFTS, H, K), normal(B, 2 * DRAFTS, HV, K)
    g = -torch.rand(B, 2 * DRAFTS, HV, device=DEVICE)
    beta = torch.rand(B, 2 * DRAFTS, HV, device=DEVICE)
    accepted = torch.randint(1, DRAFTS + 1, (B,), device=DEVICE)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    new = {name: x[:, DRAFTS:].contiguous() for name, x in tokens.items()}

    @torch.no_grad()
    def ring() -> Tensor:
        options: dict[str, Any] = {"state": state, "state_indices": slots}
        options |= {"num_pending": DRAFTS, "num_accepted": accepted}
        return ops.mixer_step(**tokens, use_qk_l2norm_in_kernel=True, **options)

    # equal outputs, of the tokens after no accepted ones
    none = {"num_pending": DRAFTS, "num_accepted": torch.zeros_like(accepted)}
    want = ops.mixer_step(
        **tokens, use_qk_l2norm_in_kernel=True, state=state, state_indices=slots, **none
    )
    off = error(verify(**new, state=state, slots=slots, kept=kept), want)

    def by_copy() -> None:
        verify(**new, state=state, slots=slots, kept=kept)
        accept(state, slots, kept, accepted)

    calls = {
        "ring": in_graph(ring),
        "snapshots": in_graph(partial(verify, **new, state=state, slots=slots, kept=kept)),
        "snapshots, copied": in_graph(by_copy),
    }
    ms = report.times(calls)
    row: dict[str, object] = {"what": f"verify {DRAFTS}", "shape": f"B{B} H{H} HV{HV}"}
    if not ms:
        return row
    moved = 2 * B * each / copy_bytes_per_ms()
    row |= {"ms": round(ms["ring"], 5), "of copy": round(moved / ms["ring"], 3)}
    for name in ("snapshots", "snapshots, copied"):
        row[f"{name} ms"] = round(ms[name], 5)
        row[f"{name} / ring"] = round(ms[name] / ms["ring"], 3)
    return row | {"differs": f"{off:.1e}"}


def prompt_arguments(name: str, lengths: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of packed sequences, and their offsets."""
    T, H, HV = sum(lengths), 16 if name == "gated_delta_rule" else 32, 32
    q, k = (F.normalize(normal(1, T, H, K).float(), dim=-1).to(BF16) for _ in range(2))
    g = (1, T, HV, K) if name == "kda" else (1, T, HV)
    given = {"q": q, "k": k, "v": normal(1, T, HV, K)}
    given |= {"g": -torch.rand(g, device=DEVICE), "beta": torch.rand(1, T, HV, device=DEVICE)}
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    narrow = BF16 if DEVICE.type == "cuda" else torch.float32
    return {n: x.to(narrow) if n in ("q", "k") else x for n, x in given.items()}, offsets


def prompts_row(name: str, N: int, report: Report) -> Row:
    """States of a pool, read and written by index: ours, and as engines call fla's function."""
    draw = random.Random(N)
    lengths = [1, 256, *(draw.randint(1, 256) for _ in range(N - 2))]
    if report.options.small:
        lengths = [1, 9, 20]
    given, cu = prompt_arguments(name, lengths)
    states = torch.randn(len(lengths) + 3, 32, K, K, device=DEVICE)
    slots = torch.randperm(len(states), device=DEVICE)[: len(lengths)].int()
    rule: Callable[..., Any] = getattr(ops, f"chunk_{name}")
    options: dict[str, Any] = {"cu_seqlens": cu, "use_qk_l2norm_in_kernel": True}
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": partial(
            serving.prefill, rule, *given.values(), states=states, slots=slots, **options
        )
    }
    row: dict[str, object] = {"what": f"prompts {name}", "shape": f"{N}, {sum(lengths)} tokens"}
    try:
        module = importlib.import_module(f"fla.ops.{name}")
        theirs: Callable[..., Any] = getattr(module, f"chunk_{name}")
        wide = {**options, "cu_seqlens": cu.long()}

        def fla() -> Tensor:
            before = states[slots]
            o, final = theirs(
                **given, initial_state=before, output_final_state=True, state_v_first=True, **wide
            )
            states[slots] = final
            return o

        calls["fla"] = fla
    except ImportError as e:
        row["fla"] = str(e)[:60]
    with torch.no_grad():
        before = states.clone()
        outs = {}
        for who, call in calls.items():
            states.copy_(before)
            row[f"{who} first s"] = round(first(lambda: outs.__setitem__(who, call())), 2)  # noqa: B023
        if "fla" in outs:
            row["differs"] = f"{error(outs['fla'], outs['ours']):.1e}"
        states.copy_(before)
        ms = report.times(calls)
    row |= rounded({f"{who} ms": x for who, x in ms.items()})
    return row | ({"fla / ours": round(ms["fla"] / ms["ours"], 3)} if "fla" in ms else {})


def works(report: Report) -> list[tuple[str, str, Call]]:
    """Names, kinds and what finds the rows."""
    found: list[tuple[str, str, Call]] = []
    for model, gpus, B in product(MIXERS, GPUS, (16, 64)):
        name = f"mixer {model} on {gpus} B{B}"
        found.append((name, "step", partial(mixer_row, model, gpus, B, report)))
    if HAVE_TRITON and DEVICE.type == "cuda":
        for B in (16, 128):
            found.append((f"verify B{B}", "step", partial(verify_row, B, 16, 32, report)))
    for name, N in product(("gated_delta_rule", "kda"), PROMPTS):
        found.append((f"prompts {name} {N}", "prompts", partial(prompts_row, name, N, report)))
    return found

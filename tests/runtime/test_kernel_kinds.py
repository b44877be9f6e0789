"""A verdict on a kernel is of one kind of calls: what a kernel is compiled for is in its key. Each
field of each key, by a call that differs from the first one in that alone."""

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.attention import latent
from slipstream.kernels.attention import plan as attention
from slipstream.kernels.attention import rotary as rotated
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attnres import op as attnres
from slipstream.kernels.conv import op as conv
from slipstream.kernels.elementwise import (
    copy_states,
    decay_gate,
    embedding,
    erase,
    glu,
    log_probs,
    place_tokens,
    rotary,
    rotation,
    token_shift,
)
from slipstream.kernels.gated_scan import op as gated_scan
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton import plan as linear
from slipstream.kernels.loss import distill, shard
from slipstream.kernels.loss import fused as loss
from slipstream.kernels.matmul import op as matmul
from slipstream.kernels.matmul.config import MatmulInputs
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.mixer_step import op as mixer_step
from slipstream.kernels.mixer_step.inputs import StepInputs
from slipstream.kernels.norm import op as norm
from slipstream.kernels.norm.inputs import NormInputs
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op as projection
from slipstream.kernels.projection_step.inputs import NormedInputs, ProjectionInputs
from slipstream.kernels.running_mean import op as running_mean
from slipstream.kernels.selective_scan import op as selective_scan
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.kernels.time_mix import low_rank, rwkv7, rwkv7_step, token_mix, token_mix_step


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape or (1,), dtype=dtype)


def narrow(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.bfloat16)


def made(inputs: Any, **given: Any) -> Any:
    """Of a NamedTuple, the other fields None."""
    return inputs(**{**dict.fromkeys(inputs._fields), **given})


def of(inputs: Any, key: Callable, **more: Any) -> Callable:
    """The key of a call given by the fields of its inputs."""
    return lambda **given: key(made(inputs, **given), **more)


def attention_kind(**given: Any) -> tuple:
    options = {n: given.pop(n) for n in AttentionOptions._fields if n in given}
    return attention.kind(AttentionInputs(**given), AttentionOptions(1.0, **options))


def norm_kind(x: Tensor, weight: Tensor | None, gate: Tensor | None, **options: Any) -> tuple:
    return norm.kind(NormInputs(x, weight, gate=gate), NormOptions(1e-5, **options))


# the key of a call, its arguments, and those of which each alone makes another
CASES: dict[str, tuple[Callable, dict[str, Any], dict[str, Any]]] = {
    "attention": (
        attention_kind,
        {x: t(1, 4, 2, 16) for x in "qkv"},
        {
            "q": narrow(1, 4, 2, 16),
            "v": t(1, 4, 2, 32),
            "g": t(1, 4, 2),
            "sinks": t(2),
            "slopes": t(2),
            "cu_q": t(2),
            "lengths": t(1),
            "seed": t(1),
            "left": 3,
            "right": 0,
            "softcap": 2.0,
        },
    ),
    "attention of a width": (
        attention_kind,
        {x: t(1, 4, 2, 16) for x in "qkv"},
        {"q": t(1, 4, 2, 32)},
    ),
    "cache": (
        attention.kind_of_cache,
        {"what": "decode", "q": t(1, 1, 2, 16), "v": t(1, 9, 2, 16), "table": None},
        {
            "what": "append",
            "q": narrow(1, 1, 2, 16),
            "v": t(1, 9, 2, 16, dtype=torch.int8),
            "table": t(1, 3),
        },
    ),
    "cache of codes": (
        attention.kind_of_cache,
        {
            "what": "decode",
            "q": t(1, 1, 2, 16),
            "v": t(1, 9, 2, 16, dtype=torch.int8),
            "table": None,
        },
        {"q": narrow(1, 1, 2, 16)},
    ),
    "cache of a dtype": (
        lambda dtype: attention.kind_of_cache(
            "decode", t(1, 1, 2, 16, dtype=dtype), t(1, 9, 2, 16, dtype=dtype), None
        ),
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
    ),
    "rotated attention": (rotated._kind, {"q": t(1, 4, 2, 16)}, {"q": narrow(1, 4, 2, 16)}),
    "rotated attention of a width": (rotated._kind, {"q": t(1, 4, 2, 16)}, {"q": t(1, 4, 2, 32)}),
    "cache of widths": (
        attention.kind_of_cache,
        {"what": "decode", "q": t(1, 1, 2, 16), "v": t(1, 9, 2, 16), "table": None},
        {"q": t(1, 1, 2, 32), "v": t(1, 9, 2, 32)},
    ),
    "cache of latents": (
        latent._kind,
        {"q": t(1, 1, 2, 16), "latent": t(1, 9, 16)},
        {"q": narrow(1, 1, 2, 16), "latent": t(1, 9, 32)},
    ),
    "attnres": (attnres._kind, {"residuals": [t(3, 8)] * 2}, {"residuals": [narrow(3, 8)] * 2}),
    "attnres of a number": (
        attnres._kind,
        {"residuals": [t(3, 8)] * 2},
        {"residuals": [t(3, 8)] * 3},
    ),
    "attnres of a width": (
        attnres._kind,
        {"residuals": [t(3, 8)] * 2},
        {"residuals": [t(3, 16)] * 2},
    ),
    "conv": (
        conv.kind,
        {"what": "triton", "x": t(1, 5, 8), "weight": t(8, 4)},
        {"what": "update", "x": narrow(1, 5, 8), "weight": narrow(8, 4)},
    ),
    "conv of a width": (
        conv.kind,
        {"what": "triton", "x": t(1, 5, 8), "weight": t(8, 4)},
        {"weight": t(8, 3)},
    ),
    "decay_gate": (
        decay_gate._kind,
        {"x": t(1, 5, 2), "A_log": t(2), "dt_bias": t(2)},
        {"x": t(1, 5, 2, 8), "A_log": narrow(2), "dt_bias": None},
    ),
    "embedding": (
        embedding._kind,
        {"input_ids": t(3, dtype=torch.int64), "weight": t(9, 8)},
        {"input_ids": t(3, dtype=torch.int32), "weight": narrow(9, 8)},
    ),
    "embedding of a width": (
        embedding._kind,
        {"input_ids": t(3, dtype=torch.int64), "weight": t(9, 8)},
        {"weight": t(9, 16)},
    ),
    "erase": (
        erase._kind,
        {"g": t(1, 5, 2, 8), "k": t(1, 5, 2, 8), "b": t(1, 5, 2, 8)},
        {"g": narrow(1, 5, 2, 8), "k": narrow(1, 5, 2, 8), "b": None},
    ),
    "gated_scan": (
        gated_scan.kind,
        {"x": t(1, 5, 8), "g": t(1, 5, 8)},
        {"x": narrow(1, 5, 8), "g": narrow(1, 5, 8)},
    ),
    "linear": (
        of(LinearInputs, linear.kind),
        {x: t(1, 9, 2, 8) for x in "qkv"},
        {
            "q": t(1, 9, 2, 16),
            "v": t(1, 9, 2, 16),
            "g": t(1, 9, 2),
            "beta": t(1, 9, 2),
            "u": t(2, 8),
            "cu_seqlens": t(2),
        },
    ),
    "linear of gates": (
        of(LinearInputs, linear.kind),
        {**{x: t(1, 9, 2, 8) for x in "qkv"}, "g": t(1, 9, 2, 8), "beta": t(1, 9, 2)},
        {"g": t(1, 9, 2), "erase": t(1, 9, 2, 8)},
    ),
    "linear of gated values": (
        of(LinearInputs, linear.kind),
        {x: t(1, 9, 2, 8) for x in "qkv"},
        {"gv": t(1, 9, 2, 8)},
    ),
    "token of linear": (
        of(LinearInputs, linear.kind, by_token=True),
        {x: t(1, 9, 2, 8) for x in "qkv"},
        {"q": t(1, 9, 2, 16), "v": t(1, 9, 2, 16), "g": t(1, 9, 2)},
    ),
    "log_probs": (
        log_probs.kind,
        {"dtype": torch.float32, "classes": 9},
        {"dtype": torch.bfloat16, "classes": 10},
    ),
    "linear_kl_div": (
        distill._kind,
        {"x": t(4, 8), "weight": t(9, 8)},
        {"x": narrow(4, 8), "weight": t(10, 8)},
    ),
    "shard of cross_entropy": (
        shard._kind,
        {"dtype": torch.float32, "classes": 9},
        {"dtype": torch.bfloat16, "classes": 10},
    ),
    "cross_entropy": (
        loss.kind,
        {"logits_dtype": torch.float32, "classes": 9},
        {"logits_dtype": torch.bfloat16, "classes": 10},
    ),
    "matmul": (
        lambda name, **given: matmul._kind(name, made(MatmulInputs, **given)),
        {"name": "triton", "a": t(4, 8), "precision": "ieee"},
        {"name": "sm90", "a": narrow(4, 8), "precision": "tf32"},
    ),
    "block_inputs": (
        lambda K, **given: block_inputs._kind(made(block_inputs.TokenInputs, **given), K),
        {"K": 8, "x": t(3, 8), "weight": t(8, 4), "g": t(3, 2), "lower_bound": None},
        {"K": 16, "x": narrow(3, 8), "weight": narrow(8, 4), "g": t(3, 2, 8), "lower_bound": -5.0},
    ),
    "block_inputs of a width": (
        lambda **given: block_inputs._kind(made(block_inputs.TokenInputs, **given), 8),
        {"x": t(3, 8), "weight": t(8, 4), "g": t(3, 2)},
        {"weight": t(8, 3)},
    ),
    "mixer_step": (
        of(StepInputs, mixer_step.kind),
        {**{x: t(2, 1, 2, 8) for x in "qkv"}, "state": t(3, 2, 8, 8)},
        {
            "q": narrow(2, 1, 2, 8),
            "v": t(2, 1, 2, 16),
            "state": narrow(3, 2, 8, 8),
            "g": t(2, 1, 2),
            "beta": t(2, 1, 2),
            "write": t(2, 1, 2, 8),
            "conv_state": t(3, 8, 4),
            "z": t(2, 1, 2, 8),
            "num_accepted": t(2),
        },
    ),
    "mixer_step of widths": (
        of(StepInputs, mixer_step.kind),
        {**{x: t(2, 1, 2, 8) for x in "qkv"}, "state": t(3, 2, 8, 8), "g": t(2, 1, 2)},
        {"q": t(2, 1, 2, 16), "g": t(2, 1, 2, 8)},
    ),
    "norm": (
        norm_kind,
        {"x": t(3, 8), "weight": t(8), "gate": None},
        {
            "x": narrow(3, 8),
            "weight": narrow(8),
            "gate": t(3, 8),
            "centre": True,
            "l2": True,
            "groups": 2,
            "zero_centered": True,
        },
    ),
    "norm of a gate": (
        norm_kind,
        {"x": t(3, 8), "weight": t(8), "gate": t(3, 8)},
        {"x": t(3, 16), "weight": None, "activation": "sigmoid", "gate_first": True},
    ),
    "glu": (glu._kind, {"gate": t(3, 8), "f": "silu"}, {"gate": t(3, 16), "f": "gelu"}),
    "glu again": (
        glu._call._kind,
        {"gate": t(3, 8), "f": "silu"},
        {"gate": narrow(3, 8), "f": "gelu"},
    ),
    "glu again of a width": (glu._call._kind, {"gate": t(3, 8), "f": "silu"}, {"gate": t(3, 16)}),
    "place_tokens": (place_tokens._kind, {"x0": t(3, 8)}, {"x0": narrow(3, 8)}),
    "running_mean": (running_mean._kind, {"k": t(1, 5, 8)}, {"k": narrow(1, 5, 8)}),
    "copy_states": (
        copy_states._kind,
        {"source": t(3, 8), "target": t(3, 8)},
        {"source": narrow(3, 8), "target": narrow(3, 8)},
    ),
    "rotary": (
        rotary._kind,
        {"x": t(1, 5, 2, 16), "half": 8, "interleaved": False},
        {"x": t(1, 5, 2, 32), "half": 4, "interleaved": True},
    ),
    "token_shift": (token_shift._kind, {"x": t(1, 5, 16)}, {"x": t(1, 5, 8)}),
    "projection": (
        of(ProjectionInputs, projection._kind),
        {"x": t(1, 16), "weights": [t(8, 16)] * 2, "glu": False, "consistent": False},
        {
            "x": t(2, 16),
            "weights": [narrow(8, 16)] * 2,
            "glu": True,
            "norm": NormOptions(1e-5),
            "residual": t(1, 16),
        },
    ),
    "projection of a width": (
        of(ProjectionInputs, projection._kind),
        {"x": narrow(33, 16), "weights": [narrow(8, 16)], "glu": False, "consistent": False},
        {"x": narrow(33, 32), "weights": [narrow(2048, 16)]},
    ),
    "projection_norm": (
        of(NormedInputs, projection._norm_kind),
        {"x": t(1, 16), "weight": t(8, 16), "residual": t(1, 8)},
        {"x": narrow(1, 16), "weight": t(16, 16), "residual": narrow(1, 8), "bias": t(8)},
    ),
    "projection_norm of a width": (
        of(NormedInputs, projection._norm_kind),
        {"x": t(1, 16), "weight": t(8, 16), "residual": t(1, 8)},
        {"weight": t(8, 32)},
    ),
    "rotation": (
        rotation._kind,
        {"q": t(1, 5, 2, 16), "theta": t(1, 5, 2, 8)},
        {"q": t(1, 5, 4, 16), "theta": t(1, 5, 2, 4)},
    ),
    "rotation of a width": (
        rotation._kind,
        {"q": t(1, 5, 2, 16), "theta": t(1, 5, 2, 8)},
        {"q": t(1, 5, 2, 32)},
    ),
    "selective_scan": (
        of(ScanInputs, selective_scan.kind),
        {
            "u": t(1, 5, 8),
            "delta": t(1, 5, 8),
            "A": t(8, 4),
            "B": t(1, 5, 1, 4),
            "C": t(1, 5, 1, 4),
        },
        {
            "u": narrow(1, 5, 8),
            "delta": narrow(1, 5, 8),
            "A": t(8, 8),
            "B": narrow(1, 5, 1, 4),
            "C": narrow(1, 5, 1, 4),
            "D": t(8),
            "z": t(1, 5, 8),
            "delta_bias": t(8),
            "initial_state": t(1, 8, 4),
        },
    ),
    "rwkv7": (
        rwkv7._kind,
        {"x": t(1, 5, 8), "parameter": t(8)},
        {"x": narrow(1, 5, 8), "parameter": None},
    ),
    "rwkv7_step": (
        lambda state, **given: rwkv7_step._kind(made(rwkv7_step.StepInputs, **given), state),
        {"state": t(3, 2, 4, 4), "r": t(2, 8), "r_k": t(2, 4)},
        {"state": narrow(3, 2, 4, 4), "r": narrow(2, 8), "r_k": t(2, 8), "v_gate": t(2, 8)},
    ),
    "low_rank": (
        of(low_rank.LowRankInputs, low_rank._kind),
        {"w": t(2, 4), "v": None},
        {"w": narrow(2, 4), "v": t(2, 4)},
    ),
    "token_mix": (
        token_mix._kind,
        {"x": t(1, 5, 8), "mu": t(6, 8)},
        {"x": narrow(1, 5, 8), "mu": t(1, 8)},
    ),
    "token_mix_step": (
        token_mix_step._kind,
        {"x": t(2, 8), "mu": t(6, 8), "state": t(3, 8)},
        {"x": narrow(2, 8), "mu": t(1, 8), "state": narrow(3, 8)},
    ),
}

# tensors whose dtype is that of another, or any
OTHER_DTYPES = {
    "linear_kl_div": "weight",
    "attention": "k v",
    "attention of a width": "k v",
    "linear": "k v g beta",
    "linear of gates": "k v g beta",
    "linear of gated values": "k v",
    "token of linear": "k",
    "block_inputs": "g",
    "block_inputs of a width": "g",
    "mixer_step": "k v g",
    "mixer_step of widths": "k v g",
    "norm of a gate": "gate",
    "projection_norm": "weight",
    "projection_norm of a width": "weight",
    "rotation": "theta",
    "rotation of a width": "theta",
    "rwkv7_step": "r_k",
}


@pytest.mark.parametrize("case", CASES)
def test_kinds_differ_by_each_dtype(case: str) -> None:
    kind, first, _ = CASES[case]
    before = kind(**first)
    for name, x in first.items():
        if name in OTHER_DTYPES.get(case, "").split():
            continue
        if isinstance(x, Tensor):
            assert kind(**{**first, name: x.to(torch.float16)}) != before, name
        elif isinstance(x, list):
            assert kind(**{**first, name: [y.to(torch.float16) for y in x]}) != before, name


@pytest.mark.parametrize("case", CASES)
def test_kinds_differ_by_each_field(case: str) -> None:
    kind, first, others = CASES[case]
    keys = [kind(**first), *(kind(**{**first, name: x}) for name, x in others.items())]
    assert len({*keys}) == 1 + len(others), keys
    # no other kernel's verdict
    assert all(type(x[0]) is str for x in keys)


def test_fields_also_differ_alone() -> None:
    """Each, of calls that differ in no other: one of two could be left out, and each call still had
    its key. A case's first word is that of all cases of a function."""
    keys = defaultdict(set)
    for case, (kind, first, others) in CASES.items():
        narrow = {name: x.half() for name, x in first.items() if isinstance(x, Tensor)}
        for given in ({}, *({name: x} for name, x in [*others.items(), *narrow.items()])):
            key = kind(**{**first, **given})
            keys[case.split()[0], len(key)].add(key)
    values, alone = defaultdict(set), set()
    for (name, size), some in keys.items():
        for i in range(size):
            values[name, i] |= {x[i] for x in some}
            if len({x[:i] + x[i + 1 :] for x in some}) < len(some):
                alone.add((name, i))
    names = {at for at, found in values.items() if len(found) == 1 and type(*found) is str}
    assert not values.keys() - alone - names


def test_every_kind_is_here() -> None:
    called = set()

    def enter(frame: FrameType, *_: Any) -> None:
        called.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(enter)
    for kind, first, _ in CASES.values():
        kind(**first)
    sys.setprofile(None)
    files = Path(kernels.__path__[0]).rglob("*.py")
    names = ((file, re.findall(r"^def (_?kind\w*)\(", file.read_text(), re.M)) for file in files)
    wanted = {(str(file), name) for file, found in names for name in found}
    assert len(wanted) > 30 and not wanted - called

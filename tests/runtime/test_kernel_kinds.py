"""A verdict on a kernel is of one kind of calls: what a kernel is compiled for is in its key. Each
field of each key, by a call that differs from the first one in that alone."""

import ast
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
from slipstream.kernels.hyper_connection import op as hyper
from slipstream.kernels.indexer import op as indexer
from slipstream.kernels.indexer.inputs import Indexing
from slipstream.kernels.linear import plan as linear
from slipstream.kernels.linear.inputs import LinearInputs
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
from slipstream.kernels.selected_attention import op as selected
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from slipstream.kernels.selective_scan import op as selective_scan
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.kernels.time_mix import rwkv7, rwkv7_step, token_mix


def values(text: str) -> list[tuple[str, Any]]:
    """What "q=[1,4,2,16] w=2*[8,16]:half n=3" names: tensors and their dtypes, a list of two, and
    what is written as in Python."""
    found = []
    for name, value in (x.split("=") for x in text.split()):
        number, star, tensor = value.rpartition("*")
        if tensor.startswith("["):
            shape, _, dtype = tensor.partition(":")
            x = torch.empty(ast.literal_eval(shape), dtype=getattr(torch, dtype or "float32"))
            found.append((name, [x] * int(number) if star else x))
        else:
            is_dtype = hasattr(torch, value)
            found.append((name, getattr(torch, value) if is_dtype else ast.literal_eval(value)))
    return found


def made(inputs: Any, **given: Any) -> Any:
    """Of a NamedTuple, the other fields None."""
    return inputs(**{**dict.fromkeys(inputs._fields), **given})


def of(inputs: Any, key: Callable, **more: Any) -> Callable:
    """The key of a call given by the fields of its inputs."""
    return lambda **given: key(made(inputs, **given), **more)


def attention_kind(**given: Any) -> tuple:
    options = {n: given.pop(n) for n in AttentionOptions._fields if n in given}
    return attention.kind(AttentionInputs(**given), AttentionOptions(1.0, **options))


def selected_kind(**given: Any) -> tuple:
    plain = {"scale": 1.0, "left": -1, "right": 0, "causal": True, "block": 4, "tail": False}
    options = {n: given.pop(n, x) for n, x in plain.items()}
    return selected._kind(SelectedInputs(**given), SelectedOptions(**options))


def norm_kind(x: Tensor, weight: Tensor | None, gate: Tensor | None, **options: Any) -> tuple:
    return norm.kind(NormInputs(x, weight, gate=gate), NormOptions(1e-5, **options))


# the key of a call, its arguments, and those of which each alone makes another: dtypes, too
CASES: dict[str, tuple[Callable, str, str]] = {
    "attention": (
        attention_kind,
        "q=[1,4,2,16] k=[1,4,2,16] v=[1,4,2,16]",
        "q=[1,4,2,32] v=[1,4,2,32] g=[1,4,2] sinks=[2] slopes=[2] cu_q=[2] lengths=[1] seed=[1] "
        "left=3 right=0 softcap=2.0",
    ),
    "selected": (
        selected_kind,
        "q=[1,4,4,16] k=[1,4,2,16] v=[1,4,2,16] selected=[1,4,1,3]:int32",
        "q=[1,4,4,32] v=[1,4,2,32] selected=[1,4,4,3]:int32 sinks=[4] cu_q=[2] cu_k=[2] "
        "lengths=[1] left=3 block=16",
    ),
    "cache": (
        attention.kind_of_cache,
        "what='decode' q=[1,1,2,16] v=[1,9,2,16] table=None",
        "what='append' q=[1,1,2,32] v=[1,9,2,16]:int8 v=[1,9,2,32] table=[1,3]",
    ),
    "cache of codes": (
        attention.kind_of_cache,
        "what='decode' q=[1,1,2,16] v=[1,9,2,16]:int8 table=None",
        "",
    ),
    "cache of a dtype": (
        lambda dtype: attention.kind_of_cache(
            "decode", *[torch.empty(1, 1, 2, 16, dtype=dtype)] * 2, None
        ),
        "dtype=float32",
        "dtype=bfloat16",
    ),
    "rotated attention": (rotated._kind, "q=[1,4,2,16]", "q=[1,4,2,32]"),
    "cache of latents": (latent._kind, "q=[1,1,2,16] latent=[1,9,16]", "latent=[1,9,32]"),
    "attnres": (attnres._kind, "residuals=2*[3,8]", "residuals=3*[3,8] residuals=2*[3,16]"),
    "mhc_pre": (
        hyper._pre_kind,
        "streams=[3,4,8] weight=[24,32]",
        "streams=[3,4,16] weight=[8,32]",
    ),
    "mhc_pre of streams": (hyper._pre_kind, "streams=[3,4,8] weight=[24,32]", "streams=[3,2,8]"),
    "mhc_post": (
        hyper._post_kind,
        "streams=[3,4,8] y=[3,8] post=[3,4] comb=[3,4,4]",
        "streams=[3,2,8] comb=None",
    ),
    "mhc_post of a width": (
        hyper._post_kind,
        "streams=[3,4,8] y=[3,8] post=[3,4] comb=[3,4,4]",
        "streams=[3,4,16]",
    ),
    "index": (
        of(Indexing, indexer._kind),
        "q=[1,4,2,16] k=[1,4,16] weights=[1,4,2] block=4 groups=1 pooled=False relu=True",
        "q=[1,4,2,32] weights=None block=16 relu=False",
    ),
    "conv": (conv.kind, "what='triton' x=[1,5,8] weight=[8,4]", "what='update' weight=[8,3]"),
    "decay_gate": (decay_gate._kind, "x=[1,5,2] A_log=[2] dt_bias=[2]", "x=[1,5,2,8] dt_bias=None"),
    "embedding": (embedding._kind, "input_ids=[3]:int64 weight=[9,8]", "weight=[9,16]"),
    "erase": (erase._kind, "g=[1,5,2,8] k=[1,5,2,8] b=[1,5,2,8]", "b=None"),
    "gated_scan": (gated_scan.kind, "x=[1,5,8] g=[1,5,8]", ""),
    "linear": (
        of(LinearInputs, linear.kind),
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8]",
        "q=[1,9,2,16] v=[1,9,2,16] g=[1,9,2] beta=[1,9,2] u=[2,8] cu_seqlens=[2] gv=[1,9,2,8]",
    ),
    "linear of gates": (
        of(LinearInputs, linear.kind),
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8] g=[1,9,2,8] beta=[1,9,2]",
        "g=[1,9,2] erase=[1,9,2,8]",
    ),
    "token of linear": (
        of(LinearInputs, linear.kind, by_token=True),
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8]",
        "q=[1,9,2,16] v=[1,9,2,16] g=[1,9,2]",
    ),
    "log_probs": (log_probs.kind, "dtype=float32 classes=9", "dtype=bfloat16 classes=10"),
    "linear_kl_div": (distill._kind, "x=[4,8] weight=[9,8]", "weight=[10,8]"),
    "shard of cross_entropy": (shard._kind, "dtype=float32 classes=9", "dtype=bfloat16 classes=10"),
    "cross_entropy": (
        loss.kind,
        "logits_dtype=float32 classes=9",
        "logits_dtype=bfloat16 classes=10",
    ),
    "matmul": (
        lambda name, **given: matmul._kind(name, made(MatmulInputs, **given)),
        "name='triton' a=[4,8] precision='ieee'",
        "name='sm90' precision='tf32'",
    ),
    "block_inputs": (
        lambda K, **given: block_inputs._kind(made(block_inputs.TokenInputs, **given), K),
        "K=8 x=[3,8] weight=[8,4] g=[3,2] lower_bound=None",
        "K=16 weight=[8,3] g=[3,2,8] lower_bound=-5.0",
    ),
    "mixer_step": (
        of(StepInputs, mixer_step.kind),
        "q=[2,1,2,8] k=[2,1,2,8] v=[2,1,2,8] state=[3,2,8,8]",
        "v=[2,1,2,16] g=[2,1,2] beta=[2,1,2] write=[2,1,2,8] conv_state=[3,8,4] z=[2,1,2,8] "
        "num_accepted=[2]",
    ),
    "mixer_step of widths": (
        of(StepInputs, mixer_step.kind),
        "q=[2,1,2,8] k=[2,1,2,8] v=[2,1,2,8] state=[3,2,8,8] g=[2,1,2]",
        "q=[2,1,2,16] g=[2,1,2,8]",
    ),
    "norm": (
        norm_kind,
        "x=[3,8] weight=[8] gate=None",
        "gate=[3,8] centre=True l2=True groups=2 zero_centered=True",
    ),
    "norm of a gate": (
        norm_kind,
        "x=[3,8] weight=[8] gate=[3,8]",
        "x=[3,16] weight=None activation='sigmoid' gate_first=True",
    ),
    "glu": (glu._kind, "gate=[3,8] f='silu'", "gate=[3,16] f='gelu'"),
    "glu again": (glu._call._kind, "gate=[3,8] f='silu'", "gate=[3,16] f='gelu'"),
    "place_tokens": (place_tokens._kind, "x0=[3,8]", ""),
    "running_mean": (running_mean._kind, "k=[1,5,8]", ""),
    "copy_states": (copy_states._kind, "source=[3,8] target=[3,8]", ""),
    "rotary": (
        rotary._kind,
        "x=[1,5,2,16] half=8 interleaved=False",
        "x=[1,5,2,32] half=4 interleaved=True",
    ),
    "token_shift": (token_shift._kind, "x=[1,5,16]", "x=[1,5,8]"),
    "projection": (
        lambda eps=None, **given: projection._kind(
            made(ProjectionInputs, norm=eps and NormOptions(eps), **given)
        ),
        "x=[1,16] weights=2*[8,16] glu=False consistent=False",
        "x=[2,16] glu=True eps=1e-5 residual=[1,16]",
    ),
    "projection of a width": (
        of(ProjectionInputs, projection._kind),
        "x=[33,16]:bfloat16 weights=1*[8,16]:bfloat16 glu=False consistent=False",
        "x=[33,32]:bfloat16 weights=1*[2048,16]:bfloat16",
    ),
    "projection_norm": (
        of(NormedInputs, projection._norm_kind),
        "x=[1,16] weight=[8,16] residual=[1,8]",
        "weight=[16,16] weight=[8,32] bias=[8]",
    ),
    "rotation": (
        rotation._kind,
        "q=[1,5,2,16] theta=[1,5,2,8]",
        "q=[1,5,4,16] q=[1,5,2,32] theta=[1,5,2,4]",
    ),
    "selective_scan": (
        of(ScanInputs, selective_scan.kind),
        "u=[1,5,8] delta=[1,5,8] A=[8,4] B=[1,5,1,4] C=[1,5,1,4]",
        "A=[8,8] D=[8] z=[1,5,8] delta_bias=[8] initial_state=[1,8,4]",
    ),
    "rwkv7": (rwkv7._kind, "x=[1,5,8] parameter=[8]", "parameter=None"),
    "rwkv7_step": (
        lambda state, **given: rwkv7_step._kind(made(rwkv7_step.StepInputs, **given), state),
        "state=[3,2,4,4] r=[2,8] r_k=[2,4]",
        "r_k=[2,8] v_gate=[2,8]",
    ),
    "low_rank": (
        of(rwkv7_step.LowRankInputs, rwkv7_step._low_rank_kind),
        "w=[2,4] v=None",
        "v=[2,4]",
    ),
    "token_mix": (token_mix._kind, "x=[1,5,8] mu=[6,8]", "mu=[1,8]"),
    "token_mix_step": (token_mix._step_kind, "x=[2,8] mu=[6,8] state=[3,8]", "mu=[1,8]"),
}

# by the first word of cases, tensors whose dtype is that of another, or any
OTHER_DTYPES = {
    "linear_kl_div": "weight",
    "attention": "k v",
    "selected": "k v selected",
    "linear": "k v g beta",
    "token": "k",
    "block_inputs": "g",
    "mixer_step": "k v g",
    "norm": "gate",
    "projection_norm": "weight",
    "rotation": "theta",
    "rwkv7_step": "r_k",
}


def calls_of(case: str) -> tuple[Callable, dict[str, Any], list[tuple[str, Any]]]:
    """A case's function and arguments; and each of these in 16 bits, by its name."""
    kind, first, _ = CASES[case]
    given = dict(values(first))
    short = {n: x.half() for n, x in given.items() if isinstance(x, Tensor)}
    short |= {n: [y.half() for y in x] for n, x in given.items() if isinstance(x, list)}
    return kind, given, list(short.items())


@pytest.mark.parametrize("case", CASES)
def test_kinds_differ_by_each_field(case: str) -> None:
    kind, first, short = calls_of(case)
    others = values(CASES[case][2])
    keys = [kind(**first), *(kind(**{**first, name: x}) for name, x in others)]
    assert len({*keys}) == 1 + len(others), keys
    # no other kernel's verdict
    assert all(type(x[0]) is str for x in keys)
    for name, x in short:
        if name not in OTHER_DTYPES.get(case.split()[0], "").split():
            assert kind(**{**first, name: x}) != keys[0], name


def test_fields_also_differ_alone() -> None:
    """Each, of calls that differ in no other: one of two could be left out, and each call still had
    its key. A case's first word is that of all cases of a function."""
    keys = defaultdict(set)
    for case in CASES:
        kind, first, short = calls_of(case)
        for given in ({}, *({name: x} for name, x in [*values(CASES[case][2]), *short])):
            key = kind(**{**first, **given})
            keys[case.split()[0], len(key)].add(key)
    values_of, alone = defaultdict(set), set()
    for (name, size), some in keys.items():
        for i in range(size):
            values_of[name, i] |= {x[i] for x in some}
            if len({x[:i] + x[i + 1 :] for x in some}) < len(some):
                alone.add((name, i))
    names = {at for at, found in values_of.items() if len(found) == 1 and type(*found) is str}
    left = sorted(values_of.keys() - alone - names)
    assert not left, f"places of keys, by their first word: a field of CASES is to change {left}"


def test_every_kind_is_here() -> None:
    called = set()

    def enter(frame: FrameType, *_: Any) -> None:
        called.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(enter)
    for case in CASES:
        kind, first, _ = calls_of(case)
        kind(**first)
    sys.setprofile(None)
    files = Path(kernels.__path__[0]).rglob("*.py")
    names = ((file, re.findall(r"^def (_?kind\w*)\(", file.read_text(), re.M)) for file in files)
    wanted = {(str(file), name) for file, found in names for name in found}
    assert len(wanted) > 30 and not wanted - called

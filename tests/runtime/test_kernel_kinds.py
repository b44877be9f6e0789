"""A verdict on a kernel is of one kind of calls: what a kernel is compiled for is in its key. Each
field of each key, by a call that differs from the first one in that alone."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.primitives.norm_options import NormOptions


def values(text: str) -> list[tuple[str, Any]]:
    """What "q=[1,4,2,16] w=2*[8,16]:half n=3" names: tensors and their dtypes, a list of two, and
    what is written as in Python. "q,v=[2]" is two, which change together."""
    found = []
    for name, value in (x.split("=") for x in text.split()):
        number, star, tensor = value.rpartition("*")
        if tensor.startswith("["):
            shape, _, dtype = tensor.partition(":")
            x = torch.empty(ast.literal_eval(shape), dtype=getattr(torch, dtype or "float32"))
            found.append((name, [x] * int(number) if star else x))
        else:
            found.append((name, eval(value, vars(torch) | {"NormOptions": NormOptions})))
    return found


def key_of(case: str, given: dict[str, Any]) -> tuple:
    """A key by the arguments that its function names, or the fields of its NamedTuples: what is
    not given is None where it has no default."""
    module, _, name = case.rpartition(" at ")[2].split()[0].partition(":")
    kind = attrgetter(name)(import_module(f"{kernels.__name__}.{module}"))
    given = {x: y for names, y in given.items() for x in names.split(",")}
    args, known = {}, set()
    for x in signature(kind).parameters.values():
        tuples = [y for y in (x.annotation, *get_args(x.annotation)) if hasattr(y, "_fields")]
        if tuples:
            empty = dict.fromkeys(tuples[0]._fields) | tuples[0]._field_defaults
            args[x.name] = tuples[0](**{n: given.get(n, y) for n, y in empty.items()})
            known |= empty.keys()
        elif x.name in given:
            args[x.name] = given[x.name]
            known.add(x.name)
    assert given.keys() <= known, f"{case}: {given.keys() - known}"
    return kind(**args)


# by a key's function, "at" that which asks it, and what is other about the case: arguments, and
# those of which each alone makes another key: dtypes, too
CASES: dict[str, tuple[str, str]] = {
    "attention.plan:kind": (
        "q=[1,4,2,16] k=[1,4,2,16] v=[1,4,2,16] scale=1.0",
        "q=[1,4,2,32] v=[1,4,2,32] g=[1,4,2] sinks=[2] slopes=[2] cu_q=[2] lengths=[1] "
        "seed=[1] left=3 right=0 softcap=2.0",
    ),
    "selected_attention.op:_kind": (
        "q=[1,4,4,16] k=[1,4,2,16] v=[1,4,2,16] selected=[1,4,1,3]:int32 scale=1.0 left=-1 "
        "right=0 causal=True block=4 tail=False",
        "q=[1,4,4,32] v=[1,4,2,32] selected=[1,4,4,3]:int32 sinks=[4] cu_q=[2] cu_k=[2] "
        "lengths=[1] left=3 block=16",
    ),
    "attention.plan:kind_of_cache": (
        "what='decode' q=[1,1,2,16] v=[1,9,2,16] table=None",
        "what='append' q=[1,1,2,32] v=[1,9,2,16]:int8 v=[1,9,2,32] table=[1,3]",
    ),
    "attention.plan:kind_of_cache of codes": (
        "what='decode' q=[1,1,2,16] v=[1,9,2,16]:int8 table=None",
        "",
    ),
    "attention.plan:kind_of_cache of a dtype": (
        "what='decode' q,v=[1,1,2,16] table=None",
        "q,v=[1,1,2,16]:bfloat16",
    ),
    "attention.rotary:_kind": ("q=[1,4,2,16]", "q=[1,4,2,32]"),
    "attention.plan:kind_of_cache at attention.latent:_kind": (
        "q=[1,1,2,16] latent=[1,9,16]",
        "latent=[1,9,32]",
    ),
    "attnres.op:_kind": ("residuals=2*[3,8]", "residuals=3*[3,8] residuals=2*[3,16]"),
    "hyper_connection.op:_pre_kind": (
        "streams=[3,4,8] weight=[24,32]",
        "streams=[3,4,16] weight=[8,32]",
    ),
    "hyper_connection.op:_pre_kind of streams": (
        "streams=[3,4,8] weight=[24,32]",
        "streams=[3,2,8]",
    ),
    "hyper_connection.op:_post_kind": (
        "streams=[3,4,8] y=[3,8] post=[3,4] comb=[3,4,4]",
        "streams=[3,2,8] comb=None",
    ),
    "hyper_connection.op:_post_kind of a width": (
        "streams=[3,4,8] y=[3,8] post=[3,4] comb=[3,4,4]",
        "streams=[3,4,16]",
    ),
    "indexer.op:_kind": (
        "q=[1,4,2,16] k=[1,4,16] weights=[1,4,2] block=4 groups=1 pooled=False relu=True",
        "q=[1,4,2,32] weights=None block=16 relu=False",
    ),
    "conv.op:kind": ("what='triton' x=[1,5,8] weight=[8,4]", "what='update' weight=[8,3]"),
    "elementwise.decay_gate:_kind": ("x=[1,5,2] A_log=[2] dt_bias=[2]", "x=[1,5,2,8] dt_bias=None"),
    "elementwise.embedding:_kind": ("input_ids=[3]:int64 weight=[9,8]", "weight=[9,16]"),
    "elementwise.erase:_kind": ("g=[1,5,2,8] k=[1,5,2,8] b=[1,5,2,8]", "b=None"),
    "elementwise.mamba_terms:_kind": (
        "u=[1,5,2,8] dt=[1,5,2] A_log=[2] dt_bias=[2] D=[2,8]",
        "u=[1,5,2,16] D=None",
    ),
    "gated_scan.op:kind": ("x=[1,5,8] g=[1,5,8]", ""),
    "linear.plan:kind": (
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8]",
        "q=[1,9,2,16] v=[1,9,2,16] g=[1,9,2] beta=[1,9,2] u=[2,8] cu_seqlens=[2] gv=[1,9,2,8]",
    ),
    "linear.plan:kind of gates": (
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8] g=[1,9,2,8] beta=[1,9,2]",
        "g=[1,9,2] erase=[1,9,2,8]",
    ),
    "linear.plan:kind_by_token at linear.plan:kind": (
        "q=[1,9,2,8] k=[1,9,2,8] v=[1,9,2,8] by_token=True",
        "q=[1,9,2,16] v=[1,9,2,16] g=[1,9,2]",
    ),
    "elementwise.log_probs:kind": ("dtype=float32 classes=9", "dtype=bfloat16 classes=10"),
    "loss.distill:_kind": ("x=[4,8] weight=[9,8]", "weight=[10,8]"),
    "loss.shard:_kind": ("dtype=float32 classes=9", "dtype=bfloat16 classes=10"),
    "loss.fused:kind": ("logits_dtype=float32 classes=9", "logits_dtype=bfloat16 classes=10"),
    "matmul.op:_kind": ("name='triton' a=[4,8] precision='ieee'", "name='sm90' precision='tf32'"),
    "mixer_step.block_inputs:_kind": (
        "K=8 x=[3,8] weight=[8,4] g=[3,2] lower_bound=None",
        "K=16 weight=[8,3] g=[3,2,8] lower_bound=-5.0",
    ),
    "mixer_step.op:kind": (
        "q=[2,1,2,8] k=[2,1,2,8] v=[2,1,2,8] state=[3,2,8,8]",
        "v=[2,1,2,16] g=[2,1,2] beta=[2,1,2] write=[2,1,2,8] conv_state=[3,8,4] z=[2,1,2,8] "
        "num_accepted=[2]",
    ),
    "mixer_step.op:kind of widths": (
        "q=[2,1,2,8] k=[2,1,2,8] v=[2,1,2,8] state=[3,2,8,8] g=[2,1,2]",
        "q=[2,1,2,16] g=[2,1,2,8]",
    ),
    "norm.op:kind": (
        "x=[3,8] weight=[8] gate=None eps=1e-5",
        "gate=[3,8] centre=True l2=True groups=2 zero_centered=True",
    ),
    "norm.op:kind of a gate": (
        "x=[3,8] weight=[8] gate=[3,8] eps=1e-5",
        "x=[3,16] weight=None activation='sigmoid' gate_first=True",
    ),
    "elementwise.glu:_kind": ("gate=[3,8] f='silu'", "gate=[3,16] f='gelu'"),
    "elementwise.glu:_call._kind": ("gate=[3,8] f='silu'", "gate=[3,16] f='gelu'"),
    "elementwise.place_tokens:_kind": ("x0=[3,8]", ""),
    "running_mean.op:_kind": ("k=[1,5,8]", ""),
    "elementwise.copy_states:_kind": ("source=[3,8] target=[3,8]", ""),
    "elementwise.rotary:_kind": (
        "x=[1,5,2,16] half=8 interleaved=False",
        "x=[1,5,2,32] half=4 interleaved=True",
    ),
    "elementwise.token_shift:_kind": ("x=[1,5,16]", "x=[1,5,8]"),
    "projection_step.op:_kind": (
        "x=[1,16] weights=2*[8,16] glu=False consistent=False",
        "x=[2,16] glu=True norm=NormOptions(1e-5) residual=[1,16]",
    ),
    "projection_step.op:_kind of a width": (
        "x=[33,16]:bfloat16 weights=1*[8,16]:bfloat16 glu=False consistent=False",
        "x=[33,32]:bfloat16 weights=1*[2048,16]:bfloat16",
    ),
    "projection_step.op:_norm_kind": (
        "x=[1,16] weight=[8,16] residual=[1,8]",
        "weight=[16,16] weight=[8,32] bias=[8]",
    ),
    "elementwise.rotation:_kind": (
        "q=[1,5,2,16] theta=[1,5,2,8]",
        "q=[1,5,4,16] q=[1,5,2,32] theta=[1,5,2,4]",
    ),
    "selective_scan.op:kind": (
        "u=[1,5,8] delta=[1,5,8] A=[8,4] B=[1,5,1,4] C=[1,5,1,4]",
        "A=[8,8] D=[8] z=[1,5,8] delta_bias=[8] initial_state=[1,8,4]",
    ),
    "time_mix.rwkv7:_kind": ("x=[1,5,8] parameter=[8]", "parameter=None"),
    "time_mix.rwkv7_step:_kind": ("state=[3,2,4,4] r=[2,8] r_k=[2,4]", "r_k=[2,8] v_gate=[2,8]"),
    "time_mix.rwkv7_step:_low_rank_kind": ("w=[2,4] v=None", "v=[2,4]"),
    "time_mix.token_mix:_kind": ("x=[1,5,8] mu=[6,8]", "mu=[1,8]"),
    "time_mix.token_mix:_step_kind": ("x=[2,8] mu=[6,8] state=[3,8]", "mu=[1,8]"),
}

# by the first word of cases, tensors whose dtype is that of another, or any
OTHER_DTYPES = {
    "loss.distill:_kind": "weight",
    "attention.plan:kind": "k v",
    "selected_attention.op:_kind": "k v selected",
    "linear.plan:kind": "k v g beta",
    "linear.plan:kind_by_token": "k",
    "mixer_step.block_inputs:_kind": "g",
    "mixer_step.op:kind": "k v g",
    "norm.op:kind": "gate",
    "projection_step.op:_norm_kind": "weight",
    "elementwise.rotation:_kind": "theta",
    "time_mix.rwkv7_step:_kind": "r_k",
}


def calls_of(case: str) -> tuple[Callable, dict[str, Any], list[tuple[str, Any]]]:
    """A case's function and arguments; and each of these in 16 bits, by its name."""
    given = dict(values(CASES[case][0]))
    short = {n: x.half() for n, x in given.items() if isinstance(x, Tensor)}
    short |= {n: [y.half() for y in x] for n, x in given.items() if isinstance(x, list)}
    return lambda **x: key_of(case, x), given, list(short.items())


@pytest.mark.parametrize("case", CASES)
def test_kinds_differ_by_each_field(case: str) -> None:
    kind, first, short = calls_of(case)
    others = values(CASES[case][1])
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
        for given in ({}, *({name: x} for name, x in [*values(CASES[case][1]), *short])):
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

"""Wrong arguments of every public operator: an error that names the argument, and no number. The
operators and their arguments come from the table of slipstream/tools/catalog.py; what it lacks,
which is mostly optional arguments and indices, is added here. Small calls on the CPU."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.runtime.dispatch import ValidationCache
from slipstream.tools.catalog import SAMPLES, Sample, Shape, flat

Args = dict[str, Any]
SHAPE = Shape(B=2, T=5, H=2, K=8, V=8, dtype=torch.float32, state=True)
ERRORS = (ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Case:
    """A valid call of an operator. indices: integer arguments, and for each of them the number that
    its values stay below."""

    sample: Sample
    indices: Mapping[str, tuple[Tensor, int | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        names = [word.partition("=")[0] for word in self.sample.tensors.split()]
        return f"{self.sample.op}-{'-'.join([*names, *self.indices])}"

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Those that take tensors."""
        takes = self.sample.takes.items()
        return {name: x for name, x in takes if "Tensor" in str(x.annotation)}

    def args(self, shape: Shape = SHAPE) -> Args:
        args = self.sample.inputs(shape, torch.device("cpu"))
        return args | {name: x.clone() for name, (x, _) in self.indices.items()}

    def call(self, args: Args) -> list[Tensor]:
        return flat(self.sample.fn(**args, **self.sample.options))


_ROWS = torch.arange(2, dtype=torch.int32)
_TABLE = torch.arange(4, dtype=torch.int32).view(2, 2)
_LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
_CACHES = "q=BTHK k_cache={0}RHK v_cache={0}RHV k=BTHK v=BTHV"
_STEP = "q=BTHK k=BTHK v=BTGV state=NGKV"
_GATED = "q=BTHK:unit k=BTHK:unit v=BTGV g=BTG{0}:gate beta=BTG:beta A_log=G dt_bias=G{0}"
_RAW = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
_RAW |= {"use_beta_sigmoid_in_kernel": True}

MORE = [
    Case(Sample("attention", "q=BTGK k=BTHK v=BTHV g=BTG:gate sinks=G alibi_slopes=G:beta"),
         {"key_lengths": (_LENGTHS, None)}),
    Case(Sample("flash_attn_func", "q=BTGK k=BTHK v=BTHV alibi_slopes=G:beta")),
    Case(Sample("flash_attn_varlen_func", "q=THK k=RHK v=RHV"),
         {"cu_seqlens_q": (torch.tensor([0, 2, 5]), None),
          "cu_seqlens_k": (torch.tensor([0, 7, 10]), None)}),
    Case(Sample("flash_attn_varlen_func", "q=THK k=RRHK v=RRHV"),
         {"cu_seqlens_q": (torch.tensor([0, 2, 5]), None),
          "cu_seqlens_k": (torch.tensor([0, 7, 10]), None), "block_table": (_TABLE, 10)}),
    Case(Sample("flash_attn_with_kvcache",
                _CACHES.format("N") + " rotary_cos=RP rotary_sin=RP alibi_slopes=H:beta sinks=H",
                grouped=False),
         {"cache_seqlens": (_LENGTHS, 6), "cache_batch_idx": (_ROWS, 2),
          "cache_leftpad": (torch.zeros(2, dtype=torch.int32), 11)}),
    Case(Sample("flash_attn_with_kvcache", _CACHES.format("R"), grouped=False),
         {"cache_seqlens": (_LENGTHS, 16), "block_table": (_TABLE, 10)}),
    Case(Sample("latent_attention", "q=BTHQ latent=RRQ",
                options={"width": 512, "scale": 0.05}, grouped=False),
         {"lengths": (_LENGTHS, None), "table": (_TABLE, 10)}),
    Case(Sample("recurrent_step", f"{_STEP} g=BTGK:gate gv=BTGV:gate u=GK"),
         {"state_indices": (_ROWS, 2)}),
    Case(Sample("recurrent_step", f"{_STEP} beta=BTG:beta p=BTHK g=BTG:gate")),
    Case(Sample("recurrent_step", f"{_STEP} a=BTHK b=BTHK")),
    Case(Sample("mixer_step", f"{_STEP} conv_state=NEW conv_weight=EW conv_bias=E g=BTG A_log=G "
                "dt_bias=G D=G z=BTGV norm_weight=V out=BTGV", options={"norm_eps": 1e-6}),
         {"state_indices": (_ROWS, 2)}),
    Case(Sample("rwkv7_step", "r=BD w=BD k=BD v=BD a=BD g=BD v_gate=BD first_value=BD w_bias=D "
                "a_bias=D v_bias=D k_k=D k_a=D r_k=HV norm_weight=D norm_bias=D state=BHVV out=BD"),
         {"state_indices": (_ROWS, 2)}),
    Case(Sample("token_mix_step", "x=BD mu=6D state=BD"), {"state_indices": (_ROWS, 2)}),
    Case(Sample("chunk_gla", "q=BTHK k=BTHK v=BTGV g=BTGK:gate gv=BTGV:gate", "NGKV")),
    Case(Sample("chunk_gated_delta_rule", _GATED.format(""), "NGKV", options=_RAW)),
    Case(Sample("fused_recurrent_gated_delta_rule",
                _GATED.format("") + " gk=BTGK:gate gv=BTGV:gate", "NGKV", options=_RAW)),
    Case(Sample("chunk_kda", _GATED.format("K"), "NGKV", options=_RAW)),
    Case(Sample("causal_conv1d_fn", "x=BDT weight=DW bias=D"),
         {"seq_idx": (torch.zeros(2, 5, dtype=torch.int32), None)}),
    Case(Sample("causal_conv1d_fn", "x=1DT weight=DW bias=D"),
         {"query_start_loc": (torch.tensor([0, 2, 5]), None)}),
    Case(Sample("causal_conv1d_update", "x=ND conv_state=NDW weight=DW bias=D"),
         {"conv_state_indices": (_ROWS, 2)}),
    Case(Sample("short_convolution", "x=BTD weight=DW bias=D residual=BTD", "NDW")),
    Case(Sample("short_convolution_update", "x=ND state=NDW weight=DW bias=D residual=ND"),
         {"state_indices": (_ROWS, 2)}),
    Case(Sample("rotary_embedding", "x=BTHK cos=RP sin=RP"),
         {"positions": (torch.arange(5).repeat(2, 1), 10)}),
    Case(Sample("rotary_tables", "", options={"dim": 8}), {"positions": (torch.arange(5), None)}),
    Case(Sample("packed_positions", "", options={"tokens": 5}),
         {"cu_seqlens": (torch.tensor([0, 2, 5]), None), "offsets": (_LENGTHS, None)}),
    Case(Sample("rms_norm", "x=BTD weight=D:one bias=D residual=BTD")),
    Case(Sample("matmul", "a=TD b=DC bias=C residual=TC scale_a=T scale_b=C")),
    Case(Sample("linear_cross_entropy", "hidden=TD weight=ZD target=T:ids bias=Z")),
    Case(Sample("linear_kl_div", "student=TD student_weight=ZD teacher=TD teacher_weight=ZD "
                "student_bias=Z teacher_bias=Z", fixed="teacher teacher_weight"),
         {"mask": (torch.ones(5, dtype=torch.bool), None)}),
    Case(Sample("index_loss", "q=BTGK k=BTK queries=BTGK keys=BTHK weights=BTG")),
    Case(Sample("glu_linear", "gate=BTC up=BTC weight=DC bias=D")),
    Case(Sample("token_shift", "x=BTD", "ND")),
]  # fmt: skip
# samples that differ in the dtype of a gate, or in what is too wide for one tile, are the same here
_NOT_HERE = ("1TL", "BTX", "narrow", "lengths")
CASES = [Case(x) for x in SAMPLES if not any(word in x.tensors for word in _NOT_HERE)] + MORE
CASES = list({case.name: case for case in CASES}.values())
# arguments of which several ranks, or any number of rows, are right
ANY_RANK = {
    "attnres": "residuals", "mhc_pre": "streams",
    "linear_log_probs": "weight", "embedding": "input_ids weight",
    "glu_linear": "weight", "l2_norm": "x",
    "matmul": "a b scale_a scale_b",
    "rotary_tables": "positions", "squared_relu": "x", "rms_norm": "x", "layer_norm": "x",
    "group_norm": "x", "cross_entropy": "", "linear_cross_entropy": "weight",
    "rotary_embedding": "x", "token_shift": "x", "causal_conv1d_fn": "x",
    "causal_conv1d_update": "x", "recurrent_step": "g beta",
    "fused_recurrent_gated_delta_rule": "beta A_log dt_bias", "chunk_kda": "A_log dt_bias",
    "chunk_gated_delta_rule": "A_log dt_bias", "latent_attention": "latent",
    "flash_attn_with_kvcache": "k_cache v_cache", "flash_attn_varlen_func": "k v",
    "token_mix_step": "mu",
}  # fmt: skip
WRONG_TYPES = (3, 3.5, "x", [1.0], object())
WRONG_DTYPES = (torch.int8, torch.complex64, torch.bool)
_NUMBERS = ("int", "float")
_NAN = float("nan")
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "chunk_size": (0, -1, 3, 1 << 40),
    "dropout_p": (-0.1, 1.5, _NAN),
    "eps": (-1e-5, _NAN),
    "norm_eps": (-1e-5, _NAN),
    "post_eps": (-1e-5, _NAN),
    "iterations": (0, -1),
    "num_groups": (0, -1, 3),
    "group_size": (0, -1, 3),
    "base": (0.0, -1.0, _NAN),
    "xpos": (0.0, _NAN),
    "dim": (-2, 3),
    "width": (0, -1),
    "softcap": (-1.0, _NAN),
    "label_smoothing": (-0.1, 1.5, _NAN),
    "temperature": (0.0, -1.0, _NAN),
    "lower_bound": (0.0, 1.0, _NAN),
    "reduction": ("", "avg"),
    "activation": ("", "tanh"),
    "impl": ("cuda",),
}
OTHER_SHAPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "one more before": lambda x: x[None],
    "one more behind": lambda x: x[..., None],
    "one less": lambda x: x[..., 0],
    "none": lambda x: x.flatten()[0],
    "a row less": lambda x: x[:-1],
    "a row more": lambda x: torch.cat([x, x[:1]]),
    "a feature less": lambda x: x[..., :-1],
}
# of which any number of these is right
FREE = {
    "a row more": "embedding:input_ids embedding:weight latent_attention:latent "
    "recurrent_step:state rwkv7_step:state short_convolution_update:state token_mix_step:state "
    "projection_step:x projection_step:weights causal_conv1d_update:conv_state attnres:residuals",
    "a feature less": "attention:selected attention:v flash_attn_func:v "
    "flash_attn_varlen_func:block_table flash_attn_with_kvcache:block_table "
    "latent_attention:table mixer_step:conv_state causal_conv1d_fn:weight "
    "causal_conv1d_update:conv_state causal_conv1d_update:weight cross_entropy:logits",
    "a row less": "rotary_embedding:positions",  # one row for all
}

# arguments whose first dimension no other one has
OWN_ROWS = {
    "projection_step-x-weights": ("x", "weights"),
    "recurrent_step-q-k-v-state-state_indices-g-gv-beta": ("state",),
}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda x: x.name)


def each(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Changes each tensor of a state that is several."""
    return tuple(map(change, x)) if isinstance(x, tuple) else change(x)


def assert_refused(case: Case, args: Args, words: str) -> str:
    """The call raises what a user may be told, which begins with one of the words."""
    with pytest.raises(ERRORS, match=rf"^(?:\w+ of )?({words})\b[^:]*: ") as refusal:
        case.call(args)
    return str(refusal.value)


@pytest.mark.parametrize("expanded", [0, 1])
def test_written_tensors_have_no_row_twice(expanded: int) -> None:
    """As expand makes them, of pools of states and windows and of results."""
    refused = set()
    for case in CASES:
        if not case.sample.op.endswith(("_step", "_update", "_kvcache")):
            continue
        for name in {"state", "conv_state", "k_cache", "v_cache", "out"} & {*case.args()}:
            args = case.args()
            x, writes = args[name], "cache" not in name or "k" in args
            if writes and isinstance(x, Tensor) and x.shape[expanded] > 1:
                args[name] = x.narrow(expanded, 0, 1).expand_as(x)
                assert_refused(case, args, name)
                refused.add(case.sample.op)
    assert {"token_mix_step", "rwkv7_step", "recurrent_step", "mixer_step"} < refused


def test_every_operator_is_here() -> None:
    public = {name for name, fn in vars(ops).items() if inspect.isfunction(fn)}
    assert public == {case.sample.op for case in CASES}


@every_case
def test_operator_refuses_what_is_no_tensor(case: Case) -> None:
    args = case.args()
    case.call(case.args())
    for name, parameter in case.parameters.items():
        wrong = [x for x in WRONG_TYPES if "int" not in str(parameter.annotation) or x != 3]
        if "None" not in str(parameter.annotation):
            wrong.append(None)
        for x in wrong:
            with pytest.raises(TypeError, match=rf"^{name}: want .*, got {type(x).__name__}"):
                case.call({**args, name: x})


@every_case
def test_operator_refuses_what_is_no_tensor_by_place(case: Case) -> None:
    """Where every argument that may come by place does."""
    given = {**case.args(), **case.sample.options}
    takes = [x for x in case.sample.takes.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    by_place = {x.name: given.pop(x.name, x.default) for x in takes}
    for name in {*by_place} & {*case.parameters}:
        with pytest.raises(TypeError, match=rf"^{name}: want .*, got object"):
            case.sample.fn(*{**by_place, name: object()}.values(), **given)


def takes(annotation: Any, x: object) -> bool:
    """Whether x is of a type that the annotation of an option names."""
    words = {str: "str", float: "float", bool: "bool", type(None): "None"}
    return annotation is Any or words.get(type(x), "nothing") in str(annotation)


@every_case
def test_operator_refuses_options_of_other_types(case: Case) -> None:
    args, options = case.args(), dict(case.sample.options)
    for name, parameter in case.sample.takes.items():
        if name in case.parameters or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        for x in (*WRONG_TYPES[1:], True, None, (1, 2, 3), ("x", 1), torch.ones(2)):
            integer = type(x) is bool and any(n in str(parameter.annotation) for n in _NUMBERS)
            if not integer and not takes(parameter.annotation, x):
                with pytest.raises(TypeError, match=rf"^{name}: want "):
                    case.sample.fn(**{**args, **options, name: x})


@every_case
def test_operator_refuses_numbers_out_of_range(case: Case) -> None:
    args, options = case.args(), dict(case.sample.options)
    for name, wrong in OUT_OF_RANGE.items():
        for x in wrong if name in case.sample.takes and name not in args else ():
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                case.sample.fn(**{**args, **options, name: x})


@every_case
def test_operator_refuses_dtypes_by_name(case: Case) -> None:
    args = case.args()
    for name in args:
        for dtype in WRONG_DTYPES:
            if getattr(args[name], "dtype", None) == dtype:
                continue
            if name == "positions" and case.sample.op == "rotary_tables" and dtype == torch.int8:
                continue  # any numbers
            wrong = each(lambda x, dtype=dtype: x.to(dtype), args[name])
            assert_refused(case, {**args, name: wrong}, name)
        if getattr(args[name], "dtype", None) == torch.float32:
            try:
                case.call({**case.args(), name: args[name].double()})
            except ERRORS as refusal:
                text = str(refusal)
            else:  # some take two
                continue
            assert re.match(rf"({'|'.join(args)})\b[^:]*: ", text)


@every_case
def test_operator_refuses_tensors_of_two_devices(case: Case) -> None:
    args = case.args()
    if len(args) > 1:
        for name, x in args.items():
            wrong = each(lambda x: x.to("meta"), x)
            with pytest.raises(ERRORS, match=r"\bwant device\b"):
                case.call({**args, name: wrong})


@every_case
def test_operator_refuses_shapes_by_name(case: Case) -> None:
    """Either one of two arguments that do not fit each other is named, and its shape."""
    args = case.args()
    any_rank = ANY_RANK.get(case.sample.op, "").split()
    for name, x in args.items():
        if name not in any_rank:
            for what, change in OTHER_SHAPES.items():
                wrong = each(change, x)
                if what == "a row less" and name in OWN_ROWS.get(case.name, ()):
                    continue
                if what == "a row less" and each(torch.numel, x) == each(torch.numel, wrong):
                    continue
                if f"{case.sample.op}:{name}" in FREE.get(what, "").split():
                    continue
                text = assert_refused(case, {**args, name: wrong}, "|".join(args))
                assert ": want " in text
                named = re.match(rf"{name}: want shape .*, got \((.*)\)", text)
                if named and case.sample.op != "selective_scan":  # whose B and C may lack groups
                    assert named[1].rstrip(",") == ", ".join(map(str, wrong.shape))


def changes(case: Case) -> list[dict[str, Any]]:
    """No option, and every one alone that is a flag or chooses kernels, other than it is."""
    defaults = {name: x.default for name, x in case.sample.takes.items()}
    options: dict[str, Any] = {**defaults, **case.sample.options}
    others: list[dict[str, Any]] = [{name: not x} for name, x in options.items() if type(x) is bool]
    others += [{"impl": x} for x in ("eager", "reference") if "impl" in options]
    return [{}, *others]


@every_case
def test_remembered_call_is_of_the_same_flags(case: Case) -> None:
    """A call is refused, or has its results, whatever calls of other options came before. Of heads
    with K != V, where a state's orientation shows in its shape."""

    def outcome(change: dict[str, Any]) -> list[Tensor] | str:
        torch.manual_seed(0)
        args = case.args(Shape(B=2, T=5, H=2, K=8, V=12, dtype=torch.float32, state=True))
        try:
            with torch.no_grad():
                return flat(case.sample.fn(**args, **{**case.sample.options, **change}))
        except ERRORS as error:
            return str(error)

    with mock.patch.object(ValidationCache, "get", lambda self, key, make, *_: make()):
        want = [outcome(x) for x in changes(case)]
    got = [outcome(x) for x in changes(case)]
    for change, x, y in zip(changes(case), got, want, strict=True):
        if isinstance(x, str) or isinstance(y, str):
            assert x == y, change
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=str(change))


@pytest.mark.parametrize(
    "case", [x for x in CASES if any(y for _, y in x.indices.values())], ids=lambda x: x.name
)
def test_operator_refuses_indices_past_the_pool(case: Case) -> None:
    for name, (_, size) in case.indices.items():
        if size is not None:
            for past in (size, 1 << 30):
                args = case.args()
                args[name].view(-1)[0] = past
                before = {name: y.clone() for name, y in args.items() if isinstance(y, Tensor)}
                assert_refused(case, args, name)
                # nothing has been written
                assert all(torch.equal(args[name], y) for name, y in before.items())


@every_case
def test_operator_makes_meta_tensors_of_meta_tensors(case: Case) -> None:
    """As models on the meta device are traced: the right shapes and dtypes, gradients too."""
    want = case.call(case.args())
    args = {name: each(lambda x: x.to("meta"), x) for name, x in case.args().items()}
    got = case.call(args)
    for x, y in zip(got, want, strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("meta", y.shape, y.dtype)
    in_place = "step" in case.sample.op or "update" in case.sample.op
    if in_place or "cache" in case.sample.op:
        return
    alone = {*case.sample.fixed.split(), "teacher_bias", "scale_a", "scale_b"}
    for name, x in args.items():
        if name not in alone:
            each(lambda x: x.requires_grad_(x.is_floating_point()), x)
    outputs = [x for x in case.call(args) if x.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    for name, x in args.items():
        if isinstance(x, Tensor) and x.grad is not None:
            assert (x.grad.device.type, x.grad.shape) == ("meta", x.shape), name


@pytest.mark.parametrize(
    "offsets", [(0, 3, 6), (0, 3, 4), (1, 3, 5), (0, 4, 3, 5)], ids=lambda x: "-".join(map(str, x))
)
@pytest.mark.parametrize(
    "case", [x for x in CASES if "cu_seqlens" in x.sample.takes], ids=lambda x: x.name
)
def test_operator_refuses_offsets_that_do_not_fit(case: Case, offsets: tuple[int, ...]) -> None:
    """They go from 0 to the number of tokens, and never fall."""
    shape = Shape(B=1, T=5, H=2, K=8, V=8, dtype=torch.float32)
    taken = {"cache_seqlens", "key_lengths", "state_indices", "seq_idx", "query_start_loc"}
    args = {name: x for name, x in case.args(shape).items() if name not in taken}
    if case.sample.op == "recurrent_step":
        args["state"] = args["state"].expand(len(offsets) - 1, -1, -1, -1).clone()
    if "offsets" in args:
        args["offsets"] = torch.zeros(len(offsets) - 1, dtype=torch.int32)
    assert_refused(case, {**args, "cu_seqlens": torch.tensor(offsets)}, "cu_seqlens")

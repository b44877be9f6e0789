"""Every public operator with sample inputs, as a table: what matrix, precompile, doctor, explain,
the tests and the benchmarks call.

A new operator is a new row; samples.py says what the letters and words of a row mean.
"""

from difflib import get_close_matches
from typing import Any

import torch

from slipstream.tools.samples import CPU as CPU
from slipstream.tools.samples import Sample as Sample
from slipstream.tools.samples import Shape as Shape
from slipstream.tools.samples import flat as flat
from slipstream.tools.samples import name_of as name_of

QKV = "q=BTHK k=BTHK v=BTGV"
UNIT = "q=BTHK:unit k=BTHK:unit v=BTGV"
_RWKV = "r=BTHK w=BTGK:bounded k=BTHK v=BTGV"
_TRAPEZOID = "g=BTG:gate dt=BTG:beta trap=BTG:beta angles=BTGP:beta"
STATE = "NGKV"


def _both(name: str, tensors: str, states: Any = STATE, **row: Any) -> list[Sample]:
    paths = ("chunk", "fused_recurrent")
    return [Sample(f"{path}_{name}", tensors, states, **row) for path in paths]


def _traced(op: str, tensors: str, states: Any = "", variant: str = "", **row: Any) -> Sample:
    """Kernels of their own; what they compute is what another row's do."""
    return Sample(op, tensors, states, variant=variant, tested=False, **row)


def _tested(op: str, variant: str, tensors: str, states: Any = "", **row: Any) -> Sample:
    """Another way to call an operator, whose kernels the matrix has from its other rows."""
    return Sample(op, tensors, states, variant=variant, traced=False, **row)


def _names(tensors: str) -> str:
    return " ".join(word.partition("=")[0] for word in tensors.split())


def _step(tensors: str, variant: str = "", B: str = "B", T: str = "1", **options: Any) -> Sample:
    """A mixer's step of T tokens, which has no gradients."""
    pools = "state=BGKV:state conv_state=BEW conv_weight=EW"
    rates = "" if "A=G" in tensors else "A_log=G "
    tensors = f"q=B1HK k=B1HK v=B1GV {pools} {rates}z=B1GV {tensors}".replace("=B1", f"=B{T}")
    tensors = tensors.replace("=B", f"={B}")
    fixed = _names(tensors)
    pooled = [word for word in fixed.split() if word.startswith(("state", "conv_state"))]
    written = {"written": " ".join(pooled), "fixed": fixed}
    return _traced("mixer_step", tensors, variant=variant, options=options, **written)


_LINEAR = [
    *_both("linear_attn", QKV, options={"normalize": False}),
    *_both("retention", QKV),
    *_both("lightning_attn", QKV, options={"layer_idx": 1, "num_layers": 4}),
    *_both("simple_gla", f"{QKV} g=BTG:gate"),
    Sample("chunk_gla", f"{QKV} g=BTGK:gate", STATE),
    _traced("fused_recurrent_gla", f"{QKV} gk=BTGK:gate", STATE),
    *_both("rwkv6", f"{_RWKV} u=GK"),
    # gates in the dtype of q
    _traced("chunk_gla", f"{QKV} g=BTGK:narrow", STATE, "narrow"),
    _traced("chunk_rwkv6", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV u=GK", STATE, "narrow"),
    *_both("gsa", "q=BTHK k=BTHK v=BTHV s=BTHM g=BTHM:gate", ("NHKM", "NHMV"), grouped=False),
    *_both("rwkv4", "w=D:rate u=D k=BTD v=BTD", ("ND", "ND")),
    *_both("mamba3", f"q=BTG1K:unit k=BTG1K:unit v=BTG1V {_TRAPEZOID}",
           (STATE, "NG1K", "NG1V", "NGP")),
    _tested("chunk_mamba3", "mimo", f"q=BTG3K:unit k=BTG3K:unit v=BTG3V {_TRAPEZOID}",
            (STATE, "NG3K", "NG3V", "NGP")),
    *_both("hgrn", "x=BTD g=BTD:gate", "ND"),
    *_both("delta_rule", f"{UNIT} beta=BTG:beta"),
    *_both("gated_delta_rule", f"{UNIT} g=BTG:gate beta=BTG:beta"),
    *_both("kda", f"{UNIT} g=BTGK:gate beta=BTG:beta"),
    # the kernels of the gate
    _traced("chunk_gated_delta_rule", f"{UNIT} g=BTG beta=BTG:beta A_log=G dt_bias=G", STATE,
            "gate", options={"use_gate_in_kernel": True}),
    _traced("chunk_kda", f"{UNIT} g=BTGK beta=BTG:beta A_log=G dt_bias=GK", STATE,
            "gate", options={"use_gate_in_kernel": True}),
    *_both("comba", f"{UNIT} p=BTHK:unit g=BTG:gate beta=BTG:beta"),
    *_both("dplr_delta_rule", f"{UNIT} a=BTHK:unit b=BTHK:erase gk=BTGK:gate"),
    *_both("gdn2", f"{UNIT} g=BTGK:gate b=BTGK:beta w=BTGV:beta"),
    *_both("rwkv7", f"{_RWKV} a=BTHK:unit b=BTHK:erase"),
    _traced("chunk_kda", f"{UNIT} g=BTGK:narrow beta=BTG:beta", STATE, "narrow"),
    _traced("chunk_rwkv7", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV a=BTHK:unit b=BTHK:erase", STATE,
            "narrow"),
    # packed calls of many heads
    _traced("chunk_gated_delta_rule",
            "q=BTXK:unit k=BTXK:unit v=BTXV g=BTX:gate beta=BTX:beta", "NXKV", "heads"),
    _traced("chunk_delta_rule", "q=BTXK:unit k=BTXK:unit v=BTXV beta=BTX:beta", "NXKV", "heads"),
    _traced("chunk_kda", "q=BTXK:unit k=BTXK:unit v=BTXV g=BTXK:gate beta=BTX:beta", "NXKV",
            "heads"),
    # of few heads, whose sequences are cut into segments
    _traced("chunk_kda", "q=BTYK:unit k=BTYK:unit v=BTYV g=BTYK:gate beta=BTY:beta", "NYKV",
            "sixteen heads"),
    *_both("gated_delta_product", "q=BTHK:unit k=BRHK:unit v=BRGV g=BTG:gate beta=BRG:beta",
           options={"num_householder": 2}),
    _tested("chunk_gla", "values", f"{QKV} g=BTGK:gate gv=BTGV:gate", STATE),
    _tested("fused_recurrent_gla", "values", f"{QKV} gk=BTGK:gate gv=BTGV:gate", STATE),
    _tested("fused_recurrent_gated_delta_rule", "all",
            f"{UNIT} g=BTG:gate gk=BTGK:gate gv=BTGV:gate beta=BTGV:beta", STATE),
    _tested("chunk_linear_attn", "normalize", "q=BTHK:positive k=BTHK:positive v=BTGV",
            ("NGKV", "N1GK:sum"), options={"normalize": True}),
]  # fmt: skip

ATTENTION = "q=BTGK k=BTHK v=BTHV"
LONGER = "q=BTGK k=BSHK v=BSHV"
NORM = "x=BTD weight=D:one bias=D"
GATE = "x=BTD gate=BTD weight=D:one"
_GLU = "gate=BTC up=BTC"
_DELTA_STEP = "beta=B1G norm_weight=V:one"
_UNIT_STEP = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "norm_eps": 1e-6}
_RWKV7_STEP = (
    "r=BD w=BD k=BD v=BD a=BD g=BD state=BHVV:state w_bias=D a_bias=D k_k=D k_a=D r_k=HV "
    "norm_weight=D:one norm_bias=D"
)
_FIRST_VALUE = "v_gate=BD first_value=BD v_bias=D"
SELECTIVE = "u=BTD delta=BTD A=D4:rate B=BT4 C=BT4"
ROTARY = "x=BTHK cos=SF sin=SF positions=BT:positions"
INDEX = "q=BTGK k=BTK weights=BTG"
LOSS = "logits=TZ target=T:targets"
_LINEAR_LOSS = "hidden=TD weight=ZD target=T:targets"
KL = "student=TD student_weight=ZD teacher=TD teacher_weight=ZD"
EVERY = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 0.7}

OPERATORS = [
    *_LINEAR,
    Sample("attention", ATTENTION),
    _traced("attention", f"{ATTENTION} g=BTG:gate sinks=G", variant="gated"),
    _traced("attention", "q=BTGA k=BTHA v=BTHA sinks=G", variant="wide"),
    _traced("attention", ATTENTION, variant="both sides",
            options={"window_size": (60, 9), "causal": False}),
    # tests/ops/test_attention.py holds both back ends against each other
    _traced("attention", ATTENTION, variant="dropout", options={"dropout_p": 0.1}, random=True),
    _tested("attention", "full", LONGER, options={"causal": False}),
    _tested("attention", "longer", LONGER),
    _tested("attention", "window", LONGER, options={"window_size": 3}),
    _tested("attention", "lengths", f"{LONGER} key_lengths=B:used"),
    _tested("attention", "packed", ATTENTION, packed=True),
    _tested("attention", "packed-cache", "q=BTGK k=NSHK v=NSHV key_lengths=N:cached",
            options={"window_size": 4}, packed=True),
    Sample("attention", f"{ATTENTION} selected=BTH9:fours", variant="selected",
           options={"block": 4, "tail": True}),
    _traced("attention", f"{ATTENTION} selected=BTH9:blocks sinks=G", variant="selected-blocks",
            options={"block": 64}),
    _traced("attention", "q=BT8K k=BT1K v=BT1V selected=BT19:blocks", variant="selected-shared",
            options={"block": 64}),
    _tested("attention", "selected-window", f"{ATTENTION} selected=BT19:fours",
            options={"block": 1, "window_size": 3}, packed=True),
    _traced(
        "flash_attn_with_kvcache",
        "q=BTHK k_cache=BRHK v_cache=BRHV k=BTHK v=BTHV cache_seqlens=B:prefixes",
        options={"causal": True},
        grouped=False,
        fixed="q k_cache v_cache k v",
        written="k_cache v_cache",
    ),
    _traced(
        "latent_attention",
        "q=BTHQ latent=BRQ lengths=B:lengths",
        options={"width": 512, "scale": 0.05},
        grouped=False,
        fixed="q latent",
    ),
    # tests/kernels/indexer holds these against their formula
    _traced("index", INDEX, options={"topk": 7}, fixed="q k weights"),
    _traced("index", "q=BTGK k=BTK", variant="blocks", fixed="q k",
            options={"topk": 3, "block": 16, "groups": 2, "local": 1, "activation": "identity"}),
    Sample("index_loss", f"{INDEX} queries=BTGK keys=BTHK", fixed="queries keys", traced=False),
    _tested("index_loss", "lists", f"{INDEX} queries=BTGK keys=BTHK selected=BT19:fours",
            # relu's kink would tell of the pooled keys' rounding
            options={"block": 4, "pool": "mean", "activation": "identity"}, fixed="queries keys",
            packed=True),
    _traced("rotary_embedding", "x=BTHK cos=TP sin=TP", fixed="cos sin"),
    _tested("rotary_embedding", "positions", ROTARY, fixed="cos sin"),
    _tested("rotary_embedding", "interleaved", ROTARY, fixed="cos sin",
            options={"interleaved": True}),
    Sample("attnres", "query=D residuals=3BTD rms_weight=D:one"),
    _tested("attnres", "normed", "query=D residuals=4BTD rms_weight=D:one output_rms_weight=D:one",
            options={"scale": 0.3}),
    Sample("mhc_pre", "streams=BT4D weight=UI:state base=U:state scale=3:state"),
    _traced("mhc_pre", "streams=BT4D weight=UI base=U scale=3", variant="narrow"),
    _tested("mhc_pre", "post", "streams=BT4D weight=8I base=8:state scale=2:state",
            options={"magnitude": 1.5, "post_eps": 0.1}),
    _tested("mhc_pre", "head", "streams=BT4D weight=4I base=4:state scale=1:state"),
    Sample("mhc_post", "streams=BT4D y=BTD post=BT4:sum comb=BT44:sum"),
    _tested("mhc_post", "identity", "streams=BT4D y=BTD post=BT4:sum"),
    Sample("rms_norm", "x=BTD weight=D:one"),
    _traced("rms_norm", "x=1TL weight=L:one", variant="long"),
    _tested("rms_norm", "bare", "x=BTD"),
    _tested("rms_norm", "residual", f"{NORM} residual=BTD",
            options={"prenorm": True, "zero_centered": True}),
    Sample("rms_norm_gated", GATE),
    _tested("rms_norm_gated", "sigmoid", GATE, options={"activation": "sigmoid"}),
    _tested("rms_norm_gated", "mamba2", GATE,
            options={"norm_before_gate": False, "group_size": 3}),
    Sample("layer_norm", NORM),
    Sample("group_norm", "x=BTD weight=D:one", options={"num_groups": 2}),
    _tested("group_norm", "rms", NORM, options={"num_groups": 2, "rms": True}),
    Sample("l2_norm", "x=BTHK"),
    Sample("short_convolution", "x=BTD weight=DW", "NDW", options={"activation": "silu"}),
    _tested("short_convolution", "residual", "x=BTD weight=DW bias=D residual=BTD", "NDW",
            options={"activation": "silu"}),
    _tested("short_convolution", "packed", "x=BTD weight=D3", "ND3", packed=True),
    _tested("short_convolution", "stateless", "x=BTD weight=D2", packed=True,
            options={"output_final_state": False}),
    _traced("short_convolution_update", "x=ND state=NDW weight=DW", fixed="x state weight",
            written="state"),
    _tested("short_convolution_update", "bias", "x=TD state=TDW weight=DW bias=D",
            options={"activation": "silu"}, written="state"),
    # tests/kernels/mixer_step hold it against its formula
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", **_UNIT_STEP),
    _step(f"g=B1GK dt_bias=GK {_DELTA_STEP}", "channel", z_activation="sigmoid", **_UNIT_STEP),
    _step("g=B1GK dt_bias=GK beta=B1GK write=B1GV norm_weight=V:one", "gates",
          z_activation="sigmoid", **_UNIT_STEP),
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", "one sequence", B="1", **_UNIT_STEP),
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", "tokens", T="4", **_UNIT_STEP),
    _step(f"g=B1G dt_bias=G num_accepted=B:prefixes {_DELTA_STEP}", "drafts", T="8",
          num_pending=4, **_UNIT_STEP),
    _step("g=B1G dt_bias=G D=G conv_bias=E norm_weight=GV:one", "mamba2", channel_order="vkq",
          dt_scales_v=True, norm_before_gate=False, norm_eps=1e-5, scale=1.0),
    _step("g=B1G A=G:gate dt_bias=G D=G", "rates", dt_scales_v=True, scale=1.0),
    _traced("recurrent_step", "q=B1HK k=B1HK v=B1GV state=BGKV:state state_indices=B:rows "
            "g=B1GK:gate gv=B1GV:gate beta=B1GV:beta", written="state",
            options={"use_qk_l2norm_in_kernel": True}, fixed="q k v g gv beta state"),
    # tests/support/rwkv7_steps.py holds these two against their formulas
    _traced("rwkv7_step", _RWKV7_STEP, written="state", fixed=_names(_RWKV7_STEP)),
    _traced("rwkv7_step", f"{_RWKV7_STEP} {_FIRST_VALUE}", variant="first value", written="state",
            fixed=_names(f"{_RWKV7_STEP} {_FIRST_VALUE}")),
    _traced("token_mix_step", "x=BD mu=6D state=BD", written="state", fixed="x mu state"),
    _traced("projection_step", "x=1D weights=CD norm_weight=D residual=1C",
            fixed="x weights norm_weight residual", options={"norm_eps": 1e-5}),
    _traced("projection_step", "x=8D weights=CD residual=8C", variant="rows",
            fixed="x weights residual"),
    _traced("projection_step", "x=MD weights=CD", variant="many rows", fixed="x weights"),
    _traced("projection_step", "x=BD weights=CD", variant="a batch", fixed="x weights"),
    Sample("selective_scan", SELECTIVE, "ND4", options={"delta_softplus": True}),
    _tested("selective_scan", "gated", f"{SELECTIVE} D=D z=BTD delta_bias=D", "ND4",
            options={"delta_softplus": True}),
    _tested("selective_scan", "groups", "u=BTD delta=BTD:positive A=D3:rate B=BT23 C=BT23", "ND3",
            packed=True),
    Sample("swiglu", _GLU),
    Sample("geglu", _GLU),
    Sample("sigmoid_glu", _GLU),
    Sample("squared_relu", "x=BTC"),
    Sample("glu_linear", f"{_GLU} weight=DC"),
    _tested("glu_linear", "geglu", f"{_GLU} weight=DC bias=D", options={"activation": "geglu"}),
    _tested("glu_linear", "squared_relu", "gate=BTC weight=DC",
            options={"up": None, "activation": "squared_relu"}),
    Sample("token_shift", "x=BTD"),
    _tested("token_shift", "state", "x=BTD", "ND:normal"),
    _tested("token_shift", "packed", "x=BTD", "ND:normal", packed=True),
    Sample("cross_entropy", LOSS),
    _traced("cross_entropy", LOSS, variant="rows", options={"reduction": "none"}),
    *[_tested("cross_entropy", x, LOSS, options={**EVERY, "reduction": x})
      for x in ("mean", "none")],
    Sample("linear_cross_entropy", _LINEAR_LOSS),
    *[_tested("linear_cross_entropy", x, f"{_LINEAR_LOSS} bias=Z",
              options={**EVERY, "reduction": x}) for x in ("mean", "sum", "none")],
    Sample("linear_log_probs", _LINEAR_LOSS, options={"temperature": 0.7}),
    Sample("linear_log_probs", f"{_LINEAR_LOSS} bias=Z", variant="entropy",
           options={"temperature": 8.0, "return_entropy": True}),
    _traced("linear_kl_div", KL, fixed="teacher teacher_weight"),
    *[_tested("linear_kl_div", x, f"{KL} student_bias=Z", fixed="teacher teacher_weight",
              options={"reduction": x}) for x in ("mean", "none")],
    Sample("matmul", "a=TD b=DC"),
    _tested("matmul", "silu", "a=TD b=DC bias=C residual=TC", options={"activation": "silu"}),
    Sample("embedding", "input_ids=BT:ids weight=ZD"),
]  # fmt: skip
SAMPLES = [x for x in OPERATORS if x.traced]

# One for each kind of kernel.
QUICK_OPERATORS = (
    "chunk_simple_gla",
    "chunk_gla",
    "chunk_gated_delta_rule",
    "chunk_rwkv7",
    "chunk_hgrn",
    "attention",
    "rms_norm",
    "short_convolution",
    "mixer_step",
    "projection_step",
    "selective_scan",
    "swiglu",
    "cross_entropy",
    "matmul",
    "embedding",
)
# Long enough for a sequence to be cut into segments.
LONG_TOKENS = 1 << 16
# What the matrix compiles: shapes that differ in what the kernels are compiled for.
_FP32 = torch.float32
REPRESENTATIVE = (
    Shape(K=128, V=128),
    Shape(K=64, V=64, dtype=torch.float16, grouped=True, packed=True, state=True),
    Shape(K=256, V=256, state=True),
    Shape(K=128, V=128, dtype=_FP32, grouped=True, packed=True, state=True),
    Shape(T=1, K=128, V=128, state=True),
    Shape(B=1, T=LONG_TOKENS, K=128, V=128),
    Shape(B=4, T=LONG_TOKENS // 8, K=128, V=128, packed=True, state=True),
)
FURTHER = (
    Shape(K=64, V=64, dtype=_FP32),
    Shape(K=256, V=256, dtype=_FP32, state=True),
    Shape(K=64, V=64, grouped=True, packed=True, state=True),
    Shape(K=100, V=60, packed=True, state=True),
    Shape(K=64, V=128, grouped=True),
)


def family(op: str) -> str:
    """Its name without the way that it goes, by chunks or token by token."""
    return op.removeprefix("chunk_").removeprefix("fused_recurrent_")


def chosen(names: list[str] | None) -> list[Sample]:
    """The rows of these operators, all of them for none; "kda" stands for both of its forms."""
    if not names:
        return SAMPLES
    found: list[Sample] = []
    for name in names:
        rows = [x for x in SAMPLES if name in (x.op, family(x.op))]
        if not rows:
            known = list(dict.fromkeys(x.op for x in SAMPLES))
            near = get_close_matches(name, [*known, *map(family, known)], n=3)
            advice = (
                f"did you mean {' or '.join(dict.fromkeys(near))}?"
                if near
                else (f"want one of {', '.join(known)}")
            )
            raise ValueError(f"operator: no {name!r}; {advice}")
        found += rows
    return found

"""Every public operator with sample inputs, as a table: what matrix, precompile, doctor, explain,
the tests and the benchmarks call.

A new operator is a new row; samples.py says what the letters and words of a row mean.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear.context_in_order import LocalSegments
from slipstream.kernels.linear.dispatch import plan_for
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.op import DEFAULT_CHUNK, forward_impl
from slipstream.kernels.mixer_step import block_inputs
from slipstream.kernels.pointwise import gated_mlp
from slipstream.kernels.pointwise.place_tokens import place_tokens
from slipstream.kernels.time_mix import rwkv7
from slipstream.kernels.time_mix.token_mix import mixed_projections
from slipstream.runtime.consistent import BLOCK
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.tools.samples import CPU as CPU
from slipstream.tools.samples import LayerSample
from slipstream.tools.samples import Sample as Sample
from slipstream.tools.samples import Shape as Shape
from slipstream.tools.samples import flat as flat
from slipstream.tools.samples import name_of as name_of

_QKV = "q=BTHK k=BTHK v=BTGV"
_UNIT = "q=BTHK:unit k=BTHK:unit v=BTGV"
_RWKV = "r=BTHK w=BTGK:bounded k=BTHK v=BTGV"
_TRAPEZOID = "g=BTG:gate dt=BTG:beta trap=BTG:beta angles=BTGP:beta"
_S = "NGKV"


def _both(name: str, tensors: str, states: Any = _S, **row: Any) -> list[Sample]:
    paths = ("chunk", "fused_recurrent")
    return [Sample(f"{path}_{name}", tensors, states, **row) for path in paths]


def _traced(op: str, tensors: str, states: Any = "", variant: str = "", **row: Any) -> Sample:
    """Kernels of their own; what they compute is what another row's do."""
    return Sample(op, tensors, states, variant=variant, tested=False, **row)


def _tested(op: str, variant: str, tensors: str, states: Any = "", **row: Any) -> Sample:
    """Another way to call an operator, whose kernels the matrix has from its other rows."""
    return Sample(op, tensors, states, variant=variant, traced=False, **row)


def _step(
    tensors: str, variant: str = "", T: str = "1", state: str = "state=BGKV:state", **options: Any
) -> Sample:
    """A mixer's step of T tokens, which has no gradients."""
    pools = f"{state} conv_state=BEW conv_weight=EW"
    tensors = f"q=B1HK k=B1HK v=B1GV {pools} A_log=G z=B1GV {tensors}".replace("=B1", f"=B{T}")
    fixed = " ".join(word.partition("=")[0] for word in tensors.split())
    pooled = [word for word in fixed.split() if word.startswith(("state", "conv_state"))]
    written = {"written": " ".join(pooled), "fixed": fixed}
    return _traced("mixer_step", tensors, variant=variant, options=options, **written)


_LINEAR = [
    *_both("linear_attn", _QKV, options={"normalize": False}),
    *_both("retention", _QKV),
    *_both("lightning_attn", _QKV, options={"layer_idx": 1, "num_layers": 4}),
    *_both("simple_gla", f"{_QKV} g=BTG:gate"),
    Sample("chunk_gla", f"{_QKV} g=BTGK:gate", _S),
    _traced("fused_recurrent_gla", f"{_QKV} gk=BTGK:gate", _S),
    *_both("rwkv6", f"{_RWKV} u=GK"),
    # gates in the dtype of q
    _traced("chunk_gla", f"{_QKV} g=BTGK:narrow", _S, "narrow"),
    _traced("chunk_rwkv6", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV u=GK", _S, "narrow"),
    *_both("gsa", "q=BTHK k=BTHK v=BTHV s=BTHM g=BTHM:gate", ("NHKM", "NHMV"), grouped=False),
    *_both("lightnet", _QKV, (_S, "NHK")),
    *_both("rwkv4", "w=D:rate u=D k=BTD v=BTD", ("ND", "ND")),
    *_both("mamba3", f"q=BTG1K:unit k=BTG1K:unit v=BTG1V {_TRAPEZOID}",
           (_S, "NG1K", "NG1V", "NGP")),
    _tested("chunk_mamba3", "mimo", f"q=BTG3K:unit k=BTG3K:unit v=BTG3V {_TRAPEZOID}",
            (_S, "NG3K", "NG3V", "NGP")),
    *_both("hgrn", "x=BTD g=BTD:gate", "ND"),
    *_both("delta_rule", f"{_UNIT} beta=BTG:beta"),
    *_both("gated_delta_rule", f"{_UNIT} g=BTG:gate beta=BTG:beta"),
    *_both("kda", f"{_UNIT} g=BTGK:gate beta=BTG:beta"),
    # the kernels of the gate
    _traced("chunk_gated_delta_rule", f"{_UNIT} g=BTG beta=BTG:beta A_log=G dt_bias=G", _S,
            "gate", options={"use_gate_in_kernel": True}),
    _traced("chunk_kda", f"{_UNIT} g=BTGK beta=BTG:beta A_log=G dt_bias=GK", _S,
            "gate", options={"use_gate_in_kernel": True}),
    *_both("comba", f"{_UNIT} p=BTHK:unit g=BTG:gate beta=BTG:beta"),
    *_both("iplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase"),
    *_both("dplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase gk=BTGK:gate"),
    *_both("gdn2", f"{_UNIT} g=BTGK:gate b=BTGK:beta w=BTGV:beta"),
    *_both("gated_oja_rule", "q=BTHK k=BTHK v=BTGV:unit gv=BTGV:gate beta=BTG:beta"),
    *_both("precond_gated_delta_rule",
           f"{_UNIT} g_atk=BTH:gate g=BTG:gate beta_atk=BTH:beta beta=BTG:beta",
           (_S, "NHK:sum")),
    *_both("precond_kda", f"{_UNIT} g=BTGK:gate g_atk=BTH:gate beta_atk=BTH:beta beta=BTG:beta",
           (_S, "NHK:sum")),
    *_both("rwkv7", f"{_RWKV} a=BTHK:unit b=BTHK:erase"),
    _traced("chunk_kda", f"{_UNIT} g=BTGK:narrow beta=BTG:beta", _S, "narrow"),
    _traced("chunk_rwkv7", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV a=BTHK:unit b=BTHK:erase", _S,
            "narrow"),
    # packed calls of many heads
    _traced("chunk_gated_delta_rule",
            "q=BTXK:unit k=BTXK:unit v=BTXV g=BTX:gate beta=BTX:beta", "NXKV", "heads"),
    _traced("chunk_delta_rule", "q=BTXK:unit k=BTXK:unit v=BTXV beta=BTX:beta", "NXKV", "heads"),
    *_both("gated_delta_product", "q=BTHK:unit k=BRHK:unit v=BRGV g=BTG:gate beta=BRG:beta",
           options={"num_householder": 2}),
    _tested("chunk_gla", "values", f"{_QKV} g=BTGK:gate gv=BTGV:gate", _S),
    _tested("fused_recurrent_gla", "values", f"{_QKV} gk=BTGK:gate gv=BTGV:gate", _S),
    _tested("fused_recurrent_gated_delta_rule", "all",
            f"{_UNIT} g=BTG:gate gk=BTGK:gate gv=BTGV:gate beta=BTGV:beta", _S),
    _tested("chunk_linear_attn", "normalize", "q=BTHK:positive k=BTHK:positive v=BTGV",
            ("NGKV", "N1GK:sum"), options={"normalize": True}),
]  # fmt: skip

_ATTENTION = "q=BTGK k=BTHK v=BTHV"
_LONGER = "q=BTGK k=BSHK v=BSHV"
_NORM = "x=BTD weight=D:one bias=D"
_GATE = "x=BTD gate=BTD weight=D:one"
_GLU = "gate=BTC up=BTC"
_DELTA_STEP = "beta=B1G norm_weight=V:one"
_UNIT_STEP = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "norm_eps": 1e-6}
_INT8 = "state=BGKV:codes state_scale=BGV:scale state_residual=BGYV:bytes"
_INT8_POOL = "state state_scale state_residual"
_SELECTIVE = "u=BTD delta=BTD A=D4:rate B=BT4 C=BT4"
_ROTARY = "x=BTHK cos=SF sin=SF positions=BT:positions"
_LOSS = "logits=TZ target=T:targets"
_LINEAR_LOSS = "hidden=TD weight=ZD target=T:targets"
_KL = "student=TD student_weight=ZD teacher=TD teacher_weight=ZD"
_EVERY = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 0.7}

OPERATORS = [
    *_LINEAR,
    Sample("attention", _ATTENTION),
    _traced("attention", f"{_ATTENTION} g=BTG:gate sinks=G", variant="gated"),
    _traced("attention", _ATTENTION, variant="both sides",
            options={"window_size": (60, 9), "causal": False}),
    # tests/ops/test_attention_dropout.py holds both back ends against each other
    _traced("attention", _ATTENTION, variant="dropout", options={"dropout_p": 0.1}, random=True),
    _tested("attention", "full", _LONGER, options={"causal": False}),
    _tested("attention", "longer", _LONGER),
    _tested("attention", "window", _LONGER, options={"window_size": 3}),
    _tested("attention", "lengths", f"{_LONGER} key_lengths=B:used"),
    _tested("attention", "packed", _ATTENTION, packed=True),
    _tested("attention", "packed-cache", "q=BTGK k=NSHK v=NSHV key_lengths=N:cached",
            options={"window_size": 4}, packed=True),
    _traced(
        "flash_attn_with_kvcache",
        "q=BTHK k_cache=BRHK v_cache=BRHV k=BTHK v=BTHV cache_seqlens=B:prefixes",
        options={"causal": True},
        grouped=False,
        fixed="q k_cache v_cache k v",
    ),
    _traced(
        "latent_attention",
        "q=BTHQ latent=BRQ lengths=B:lengths",
        options={"width": 512, "scale": 0.05},
        grouped=False,
        fixed="q latent",
    ),
    _traced("rotary_embedding", "x=BTHK cos=TP sin=TP", fixed="cos sin"),
    _tested("rotary_embedding", "positions", _ROTARY, fixed="cos sin"),
    _tested("rotary_embedding", "interleaved", _ROTARY, fixed="cos sin",
            options={"interleaved": True}),
    Sample("attnres", "query=D residuals=3BTD rms_weight=D:one"),
    _tested("attnres", "normed", "query=D residuals=4BTD rms_weight=D:one output_rms_weight=D:one",
            options={"scale": 0.3}),
    Sample("rms_norm", "x=BTD weight=D:one"),
    _traced("rms_norm", "x=1TL weight=L:one", variant="long"),
    _tested("rms_norm", "bare", "x=BTD"),
    _tested("rms_norm", "residual", f"{_NORM} residual=BTD",
            options={"prenorm": True, "zero_centered": True}),
    Sample("rms_norm_gated", _GATE),
    _tested("rms_norm_gated", "sigmoid", _GATE, options={"activation": "sigmoid"}),
    _tested("rms_norm_gated", "mamba2", _GATE,
            options={"norm_before_gate": False, "group_size": 3}),
    Sample("layer_norm", _NORM),
    Sample("group_norm", "x=BTD weight=D:one", options={"num_groups": 2}),
    _tested("group_norm", "rms", _NORM, options={"num_groups": 2, "rms": True}),
    Sample("l2_norm", "x=BTHK"),
    Sample("short_convolution", "x=BTD weight=DW", "NDW", options={"activation": "silu"}),
    _tested("short_convolution", "residual", "x=BTD weight=DW bias=D residual=BTD", "NDW",
            options={"activation": "silu"}),
    _tested("short_convolution", "packed", "x=BTD weight=D3", "ND3", packed=True),
    _tested("short_convolution", "stateless", "x=BTD weight=D2", packed=True,
            options={"output_final_state": False}),
    _traced("short_convolution_update", "x=ND state=NDW weight=DW", fixed="x state weight"),
    _tested("short_convolution_update", "bias", "x=TD state=TDW weight=DW bias=D",
            options={"activation": "silu"}, written="state"),
    # tests/kernels/mixer_step hold it against its formula
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", **_UNIT_STEP),
    _step(f"g=B1GK dt_bias=GK {_DELTA_STEP}", "channel", z_activation="sigmoid", **_UNIT_STEP),
    _step("g=B1GK dt_bias=GK beta=B1GK write=B1GV norm_weight=V:one", "gates",
          z_activation="sigmoid", **_UNIT_STEP),
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", "tokens", T="4", **_UNIT_STEP),
    _step("g=B1G dt_bias=G D=G conv_bias=E norm_weight=GV:one", "mamba2", channel_order="vkq",
          dt_scales_v=True, norm_before_gate=False, norm_eps=1e-5, scale=1.0),
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", "int8", state=_INT8, **_UNIT_STEP),
    _traced("recurrent_step", f"q=B1HK k=B1HK v=B1GV g=B1G:gate beta=B1G:beta {_INT8}",
            variant="int8", written=_INT8_POOL, fixed=f"q k v g beta {_INT8_POOL}"),
    _traced("projection_step", "x=1D weights=CD norm_weight=D residual=1C",
            fixed="x weights norm_weight residual", options={"norm_eps": 1e-5}),
    _traced("projection_step", "x=8D weights=CD residual=8C", variant="rows",
            fixed="x weights residual"),
    Sample("selective_scan", _SELECTIVE, "ND4", options={"delta_softplus": True}),
    _tested("selective_scan", "gated", f"{_SELECTIVE} D=D z=BTD delta_bias=D", "ND4",
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
    Sample("cross_entropy", _LOSS),
    _traced("cross_entropy", _LOSS, variant="rows", options={"reduction": "none"}),
    *[_tested("cross_entropy", x, _LOSS, options={**_EVERY, "reduction": x})
      for x in ("mean", "none")],
    Sample("linear_cross_entropy", _LINEAR_LOSS),
    *[_tested("linear_cross_entropy", x, f"{_LINEAR_LOSS} bias=Z",
              options={**_EVERY, "reduction": x}) for x in ("mean", "sum", "none")],
    Sample("linear_log_probs", _LINEAR_LOSS, options={"temperature": 0.7}),
    Sample("linear_log_probs", f"{_LINEAR_LOSS} bias=Z", variant="entropy",
           options={"temperature": 8.0, "return_entropy": True}),
    _traced("linear_kl_div", _KL, fixed="teacher teacher_weight"),
    *[_tested("linear_kl_div", x, f"{_KL} student_bias=Z", fixed="teacher teacher_weight",
              options={"reduction": x}) for x in ("mean", "none")],
    Sample("matmul", "a=TD b=DC"),
    _tested("matmul", "silu", "a=TD b=DC bias=C residual=TC", options={"activation": "silu"}),
    Sample("embedding", "input_ids=BT:ids weight=ZD"),
]  # fmt: skip
SAMPLES = [x for x in OPERATORS if x.traced]


def _mixed(
    x: Tensor, before: Tensor, mu: Tensor, weight: Tensor, impl: str | None = None
) -> list[Tensor] | None:
    return mixed_projections(x, before, mu, [[weight]] * len(mu), impl)


def _mixes(count: int) -> LayerSample:
    tensors = f"x=BTD before=BTD mu={count}D weight=DD"
    return LayerSample("token_mix", tensors, variant=str(count), tested=False, function=_mixed)


def _rwkv7_terms(
    w: Tensor,
    k: Tensor,
    a: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    v: Tensor | None = None,
    v_gate: Tensor | None = None,
    first_value: Tensor | None = None,
    impl: str | None = None,
) -> list[Tensor]:
    heads = max(k.shape[-1] // 64, 1)
    return rwkv7.recurrence_terms(w, k, a, v, v_gate, first_value, k_k, k_a, heads, impl)


def _rwkv7_output(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    r_k: Tensor,
    impl: str | None = None,
) -> Tensor:
    gate, weight, bias = (x.flatten(-2) for x in (gate, weight, bias))
    return rwkv7.output(v, r, k, v, gate, weight, bias, r_k, 1e-5, impl)


def _gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, impl: str | None = None
) -> Tensor:
    """By the kernel of sm_90 where that is chosen, else as by its layers."""
    reason = gated_mlp.unsupported_reason(x, gate, up, down, "silu")
    if impl == "sm90" and reason is not None:
        raise NotImplementedError(reason)
    impls = impl or (gated_mlp.IMPLS if reason is None else TRITON_OR_EAGER)
    return gated_mlp.gated_mlp(x, gate, up, down, None, "silu", impls)


class _Sends(LocalSegments):
    """A rank's exchange without the messages."""

    @property
    def sends(self) -> bool:
        return True


def _delta_across_ranks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    terms = LinearInputs(q, k, v, g=g, beta=beta)
    call = ForwardCall(q.shape[-1] ** -0.5, DEFAULT_CHUNK, plan_for(terms, impl).impls)
    o, final, *_ = forward_impl(*terms, *call, exchange=_Sends(1024))
    return o, final


def _consistent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, impl: str | None = None
) -> Any:
    return ops.chunk_simple_gla(q, k, v, g, output_final_state=True, consistent=True, impl=impl)


def _prefix_states(rule: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, impl: str | None = None, **more: Any
    ) -> Any:
        rows = q.new_zeros(q.shape[0], -(-q.shape[1] // BLOCK), dtype=torch.int32)
        pool = q.new_zeros(1, *v.shape[2:], k.shape[-1], dtype=torch.float32)
        with torch.no_grad():
            prefix = ops.PrefixStates(pool, rows)
            return rule(q, k, v, g, impl=impl, prefix_states=prefix, **more)

    return call


def _place_tokens(
    q: Tensor, g: Tensor, qs: Tensor, gs: Tensor, counts: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    place_tokens([q[:, None], g[:, None]], [qs, gs], counts.long(), impl)
    return qs, gs


def _block_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, counts: Tensor, impl: str = ""
) -> block_inputs.Blocks:
    x = torch.cat([y.flatten(1) for y in (q, k, v)], 1)
    weight, rate = x.new_ones(x.shape[1], 4), g.new_ones(g.shape[1], dtype=torch.float32)
    window = x.new_ones(x.shape[0], 4, x.shape[1])
    blocks = [y[:, None].repeat_interleave(BLOCK, 1) for y in (q, k, v, g.float(), beta)]
    tokens = block_inputs.TokenInputs(
        x, weight, None, g, rate, rate, beta, counts.long(), True, False, None
    )
    if impl != "eager" and (reason := block_inputs.unsupported_reason(tokens, q.shape[-1])):
        raise NotImplementedError(reason)
    made = block_inputs.Blocks(window, *blocks)
    block_inputs.block_inputs(tokens, made, impl or TRITON_OR_EAGER)
    return made


def _on_8_bits(q: Tensor, impl: str | None = None, **cache: Tensor) -> Any:
    return ops.flash_attn_with_kvcache(q, **cache, causal=True, impl=impl)  # pyright: ignore[reportArgumentType]


def _of_layer(name: str, function: Any, tensors: str, variant: str = "") -> LayerSample:
    return LayerSample(name, tensors, variant=variant, tested=False, function=function)


_RWKV7_OUTPUT = "r=BTHV k=BTHV v=BTHV gate=BTHV weight=HV bias=HV r_k=HV"
_RWKV7_TERMS = "w=BTD k=BTD a=BTD k_k=D k_a=D"
_8_BITS = "q=BTHK k_cache=BRHK:codes v_cache=BRHV:codes k_scale=BRH:sum v_scale=BRH:sum"
# as rwkv7's time and channel mix call it, a gated MLP, a context, consistent models, their steps,
# states of prefixes, and caches in 8 bits
LAYER_SAMPLES = [
    _mixes(6),
    _mixes(1),
    _of_layer("rwkv7_terms", _rwkv7_terms, _RWKV7_TERMS, "first"),
    _of_layer("rwkv7_terms", _rwkv7_terms, f"{_RWKV7_TERMS} v=BTD v_gate=BTD first_value=BTD"),
    _of_layer("rwkv7_output", _rwkv7_output, _RWKV7_OUTPUT),
    _of_layer("gated_mlp", _gated_mlp, "x=LD gate=CD up=CD down=DC"),
    _of_layer("delta_rule_across_ranks", _delta_across_ranks, f"{_UNIT} g=BTG:gate beta=BTG:beta"),
    _of_layer("place_tokens", _place_tokens, "q=BHK g=BG qs=BTHK gs=BTG counts=B:prefixes"),
    _of_layer(
        "block_inputs", _block_inputs, "q=BHK k=BHK v=BGV g=BG beta=BG:beta counts=B:prefixes"
    ),
    _of_layer("consistent_simple_gla", _consistent_simple_gla, f"{_QKV} g=BTG:gate"),
    *(
        _of_layer(f"prefixes_of_{x.__name__}", _prefix_states(x), tensors)
        for x, tensors in (
            (ops.chunk_gated_delta_rule, f"{_UNIT} g=BTG:gate beta=BTG:beta"),
            (ops.chunk_kda, f"{_UNIT} g=BTGK:gate beta=BTG:beta"),
            (ops.chunk_simple_gla, f"{_QKV} g=BTG:gate"),
            (ops.chunk_gla, f"{_QKV} g=BTGK:narrow"),
        )
    ),
    LayerSample(
        "attention_on_8_bits",
        f"{_8_BITS} cache_seqlens=B:prefixes",
        tested=False,
        grouped=False,
        fixed="q k_cache v_cache k_scale v_scale",
        function=_on_8_bits,
    ),
]


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
_BF16, _FP32 = torch.bfloat16, torch.float32
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

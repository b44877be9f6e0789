"""Wrong arguments of the peers' functions: an error that names the argument, and no number."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compat import flash_attn_interface as flash_attn_3
from slipstream.compat.causal_conv1d import causal_conv1d_interface, causal_conv1d_varlen
from slipstream.compat.fla.modules import fused_norm_gate, layernorm, layernorm_gated
from slipstream.compat.flash_attn import bert_padding, flash_attn_interface
from slipstream.compat.flash_attn.layers import rotary
from slipstream.compat.flash_attn.ops.triton import cross_entropy
from slipstream.compat.flash_attn.ops.triton import layer_norm as fused_norm
from slipstream.compat.flash_attn.ops.triton import rotary as fused_rotary
from slipstream.compat.mamba_ssm.ops import selective_scan_interface
from slipstream.compat.mamba_ssm.ops.triton import layer_norm as mamba_norm
from slipstream.compat.mamba_ssm.ops.triton import selective_state_update, ssd_combined

B, T, D, N, H, P = 2, 5, 6, 4, 2, 8
ERRORS = (ValueError, TypeError, NotImplementedError)
WRONG_TYPES = ("x", -1, 1.5, object(), [1.0], (1, 2, 3))
# arguments whose rank is free, or that change nothing here
ANY_SHAPE = {"precomputed_lse", "scheduler_metadata", "bias1"}
ANY_SHAPE |= {"max_seqlen", "max_seqlen_q", "max_seqlen_k", "cu_seqlens"}
# errors call these by the name that slipstream.ops has
OF_OPS = ("cu_seqlens", "cu_seqlens_q", "sin", "weight", "eps")
ALSO = {"process_group": "group", "page_table": "block_table", "seqused_k": "key_lengths"}


def rand(*shape: int) -> Tensor:
    return torch.rand(shape)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def convolved() -> dict[str, Any]:
    return {"x": rand(B, D, T), "weight": rand(D, 4), "bias": rand(D)}


def convolved_next() -> dict[str, Any]:
    return {"x": rand(B, D), "conv_state": rand(B, D, 4), "weight": rand(D, 4), "bias": rand(D)}


def scanned() -> dict[str, Any]:
    sizes = {"u": (B, D, T), "delta": (B, D, T), "A": (D, N), "B": (B, N, T), "C": (B, N, T)}
    sizes |= {"D": (D,), "z": (B, D, T), "delta_bias": (D,)}
    return {name: rand(*size) for name, size in sizes.items()} | {"A": -rand(D, N)}


def mamba_inner() -> dict[str, Any]:
    sizes = {"xz": (B, 2 * D, T), "conv1d_weight": (D, 1, 4), "conv1d_bias": (D,)}
    sizes |= {"x_proj_weight": (2 + 2 * N, D), "delta_proj_weight": (D, 2)}
    sizes |= {"out_proj_weight": (3, D), "out_proj_bias": (3,), "D": (D,), "delta_bias": (D,)}
    return {name: rand(*size) for name, size in sizes.items()} | {"A": -rand(D, N)}


def state_update() -> dict[str, Any]:
    sizes = {"state": (B, D, N), "x": (B, D), "dt": (B, D), "B": (B, N), "C": (B, N)}
    sizes |= {"D": (D,), "z": (B, D), "dt_bias": (D,)}
    return {name: rand(*size) for name, size in sizes.items()} | {"A": -rand(D, N)}


def chunk_scan() -> dict[str, Any]:
    sizes = {"x": (B, T, H, P), "dt": (B, T, H), "B": (B, T, 1, N), "C": (B, T, 1, N)}
    sizes |= {"D": (H,), "z": (B, T, H, P), "dt_bias": (H,)}
    return {name: rand(*size) for name, size in sizes.items()} | {"A": -rand(H), "chunk_size": 16}


def split_scan() -> dict[str, Any]:
    dim = H * P
    sizes = {"zxbcdt": (B, T, 2 * dim + 2 * N + H), "conv1d_weight": (dim + 2 * N, 4)}
    sizes |= {"conv1d_bias": (dim + 2 * N,), "dt_bias": (H,), "D": (H,), "rmsnorm_weight": (dim,)}
    sizes |= {"outproj_weight": (3, dim)}
    made: dict[str, Any] = {name: rand(*size) for name, size in sizes.items()}
    return made | {"A": -rand(H), "chunk_size": 16, "headdim": P}


def normed() -> dict[str, Any]:
    return {"x": rand(B, T, D), "weight": rand(D), "bias": rand(D), "residual": rand(B, T, D)}


def normed_linear() -> dict[str, Any]:
    made = {"x": rand(B, T, D), "norm_weight": rand(D), "norm_bias": rand(D)}
    return made | {"linear_weight": rand(3, D), "linear_bias": rand(3)}


def heads(*names: str) -> dict[str, Any]:
    return {name: rand(B, T, H, P) for name in names}


def packed_heads() -> dict[str, Any]:
    made: dict[str, Any] = {name: rand(T, H, P) for name in ("q", "k", "v")}
    offsets = {"cu_seqlens_q": integers(0, 2, T), "cu_seqlens_k": integers(0, 2, T)}
    return made | offsets | {"max_seqlen_q": 3, "max_seqlen_k": 3}


def turned(name: str, *shape: int) -> dict[str, Any]:
    return {name: rand(*shape), "cos": rand(9, P // 2), "sin": rand(9, P // 2)}


CASES: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = [
    (causal_conv1d_interface.causal_conv1d_fn, convolved),
    (causal_conv1d_interface.causal_conv1d_ref, convolved),
    (causal_conv1d_interface.causal_conv1d_update, convolved_next),
    (causal_conv1d_interface.causal_conv1d_update_ref, convolved_next),
    (causal_conv1d_varlen.causal_conv1d_varlen_states,
     lambda: {"x": rand(T, D), "cu_seqlens": integers(0, 2, T), "state_len": 3}),
    (selective_scan_interface.selective_scan_fn, scanned),
    (selective_scan_interface.selective_scan_ref, scanned),
    (selective_scan_interface.mamba_inner_fn, mamba_inner),
    (selective_state_update.selective_state_update, state_update),
    (ssd_combined.mamba_chunk_scan_combined, chunk_scan),
    (ssd_combined.mamba_split_conv1d_scan_combined, split_scan),
    (mamba_norm.layer_norm_fn, normed),
    (mamba_norm.rms_norm_fn, normed),
    (fused_norm.layer_norm_fn, normed),
    (fused_norm.layer_norm_linear_fn, normed_linear),
    (cross_entropy.cross_entropy_loss, lambda: {"logits": rand(T, 9), "labels": torch.arange(T)}),
    (flash_attn_interface.flash_attn_qkvpacked_func, lambda: {"qkv": rand(B, T, 3, H, P)}),
    (flash_attn_interface.flash_attn_kvpacked_func,
     lambda: {"q": rand(B, T, H, P), "kv": rand(B, T, 2, H, P)}),
    (flash_attn_3.flash_attn_func, lambda: heads("q", "k", "v")),
    (flash_attn_3.flash_attn_varlen_func, packed_heads),
    (flash_attn_3.flash_attn_with_kvcache,
     lambda: {"q": rand(B, 1, H, P), **heads("k_cache", "v_cache"),
              "cache_seqlens": integers(3, 4)}),
    (flash_attn_3.flash_attn_combine,
     lambda: {"out_partial": rand(3, B, T, H, P), "lse_partial": rand(3, B, T, H)}),
    (bert_padding.unpad_input,
     lambda: {"hidden_states": rand(B, T, D), "attention_mask": torch.ones(B, T)}),
    (bert_padding.pad_input,
     lambda: {"hidden_states": rand(B * T, D), "indices": torch.arange(B * T), "batch": B,
              "seqlen": T}),
    (rotary.apply_rotary_emb, lambda: turned("x", B, T, H, P)),
    (rotary.apply_rotary_emb_qkv_, lambda: turned("qkv", B, T, 3, H, P)),
    (fused_rotary.apply_rotary, lambda: turned("x", B, T, H, P)),
]  # fmt: skip
every_case = pytest.mark.parametrize(
    ("function", "valid"),
    [pytest.param(*c, id=f"{c[0].__module__.split('.')[2]}-{c[0].__name__}") for c in CASES],
)


def words_of(function: Callable[..., Any]) -> str:
    """Names that a message may have: either one of two arguments that do not fit each other."""
    names = list(inspect.signature(function).parameters)
    return "|".join([*names, *(ALSO[x] for x in names if x in ALSO), *OF_OPS])


@every_case
def test_function_refuses_other_types(
    function: Callable[..., Any], valid: Callable[[], dict[str, Any]]
) -> None:
    function(**valid())
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = str(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for x in WRONG_TYPES:
            number = type(x) in (int, float) and ("int" in annotation or "float" in annotation)
            if number or type(x).__name__ in annotation:
                continue
            word = ALSO.get(name, name)
            with pytest.raises(ERRORS, match=rf"\b({name}|{word})\b"):
                function(**{**valid(), name: x})


@every_case
def test_function_refuses_other_shapes(
    function: Callable[..., Any], valid: Callable[[], dict[str, Any]]
) -> None:
    words = re.compile(rf"\b({words_of(function)})\b")
    for name, parameter in inspect.signature(function).parameters.items():
        if "Tensor" not in str(parameter.annotation) or name in ANY_SHAPE:
            continue
        for wrong in (rand(7), rand(2, 3, 4, 5, 6, 7)):
            with pytest.raises(ERRORS, match=words):
                function(**{**valid(), name: wrong})


def test_functions_with_given_arguments_name_themselves() -> None:
    """Not the function that they hand them to."""
    modules = {fused_norm_gate, layernorm, layernorm_gated, fused_norm}
    made = {
        f
        for module in modules | {mamba_norm, selective_scan_interface}
        for f in vars(module).values()
        if getattr(inspect.unwrap(f), "__name__", "") != getattr(f, "__name__", "")
    }
    assert len(made) >= 12
    for f in made:
        for args, options in ((), {}), ((), {"unknown": 1}), ((1,) * 40, {}):
            with pytest.raises(TypeError, match=rf"^{f.__name__}\(\) "):
                f(*args, **options)

"""Makes the modules of fla that have no file here: operators, and other names of our modules."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from slipstream.compat.fixed import missing_names
from slipstream.compat.fla import adaptor, functions, operators

ROOT = "slipstream.compat.fla"

# functions that are no operators, by the module that defines them in fla
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ops.attn.decoding": functions.attn_decoding_one_step,
    "ops.attnres.fused": functions.fused_attnres,
    "ops.common.gate": functions.fused_beta_sigmoid,
    "ops.gated_delta_rule.gate": functions.fused_gdn_gate,
    "ops.gsa.gate": functions.fused_additive_gate,
    "ops.kda.gate": functions.fused_kda_gate,
    "ops.rwkv4.fused_recurrent": functions.fused_recurrent_rwkv4,
    "ops.rwkv7.channel_mixing": functions.channel_mixing_rwkv7,
    "ops.rwkv7.fused_addcmul": functions.fused_addcmul_rwkv7,
    "ops.rwkv7.fused_k_update": functions.fused_k_rwkv7,
    "ops.rwkv7.gate_output_correction": functions.gate_output_correction,
}
# classes that fla.modules has, by the module that defines them
MODULES: dict[str, str] = {
    "convolution": "ShortConvolution",
    "fused_cross_entropy": "FusedCrossEntropyLoss",
    "fused_kl_div": "FusedKLDivLoss",
    "fused_linear_cross_entropy": "FusedLinearCrossEntropyLoss",
    "fused_norm_gate": "FusedLayerNormGated FusedLayerNormGatedLinear FusedLayerNormSwishGate "
    "FusedLayerNormSwishGateLinear FusedRMSNormGated FusedRMSNormGatedLinear "
    "FusedRMSNormSwishGate FusedRMSNormSwishGateLinear",
    "l2norm": "L2Norm",
    "layernorm": "GroupNorm GroupNormLinear LayerNorm LayerNormLinear RMSNorm RMSNormLinear",
    "layernorm_gated": "LayerNormGated RMSNormGated",
    "mlp": "GatedMLP",
    "rotary": "RotaryEmbedding",
    "token_shift": "TokenShift",
}
# further names of modules, below fla.modules: those of fla 0.6, and of older releases
_ALIASES: dict[str, str] = {
    "modules": "norm",
    "modules.activations": "activations.ops",
    "modules.convolution": "causal_conv1d causal_conv1d.cp causal_conv1d.ops conv "
    "conv.causal_conv1d conv.cp conv.cp.ops conv.cuda conv.cuda.ops conv.short_conv conv.triton "
    "conv.triton.ops",
    "modules.fused_cross_entropy": "fused_cross_entropy.ops",
    "modules.fused_kl_div": "fused_kl_div.ops",
    "modules.fused_linear_cross_entropy": "fused_linear_cross_entropy.ops",
    "modules.fused_norm_gate": "norm.fused_norm_gate",
    "modules.l2norm": "norm.l2norm",
    "modules.layernorm": "norm.layernorm",
    "modules.layernorm_gated": "norm.layernorm_gated",
    "modules.rotary": "rotary.ops",
}
ALIASES = {f"modules.{x}": path for path, names in _ALIASES.items() for x in names.split()}
# Classes of torch.autograd.Function, by the module that defines them: the function whose call their
# apply() is, and fla's parameters of forward. torchtitan 0.3.0 registers these.
AUTOGRAD: dict[str, tuple[str, str, str]] = {
    "modules.convolution": (
        "CausalConv1dFunction", "causal_conv1d",
        "x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
        "activation=None, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64",
    ),
    "ops.gated_delta_rule.chunk": (
        "ChunkGatedDeltaRuleFunction", "chunk_gated_delta_rule",
        "q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, cp_context=None, chunk_size=64",
    ),
    "ops.gated_delta_rule.fused_recurrent": (
        "FusedRecurrentFunction", "fused_recurrent_gated_delta_rule",
        "q, k, v, g=None, gk=None, gv=None, beta=None, A_log=None, dt_bias=None, scale=None, "
        "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
        "cu_seqlens=None",
    ),
}  # fmt: skip
# what fla 0.6 has where Slipstream has other names; whole modules that are missing say so by
# themselves
MISSING: dict[str, tuple[str, ...]] = {
    "modules": (
        "BitLinear", "FusedBitLinear", "ImplicitLongConvolution", "LongConvolution", "NormParallel",
    ),
    "modules.convolution": (
        "CausalConv1dFunctionCP", "FastCausalConv1dFn", "ImplicitLongConvolution",
        "LongConvolution", "PositionalEmbedding", "causal_conv1d_bwd", "causal_conv1d_cuda",
        "causal_conv1d_fwd", "causal_conv1d_update_states", "compute_dh0_triton",
        "fast_causal_conv1d_fn", "fft_conv",
    ),
    "modules.fused_linear_cross_entropy": ("LinearLossParallel",),
    "modules.layernorm": ("NormParallel",),
    "modules.mlp": ("SwiGLULinearParallel",),
    "ops": (
        "chunk_cyfa", "chunk_gated_oja_rule", "chunk_iplr_delta_rule", "chunk_lightnet",
        "chunk_log_linear_attn", "chunk_mesa_net", "chunk_momentum_delta_rule",
        "chunk_precond_gated_delta_rule", "chunk_precond_kda", "fused_chunk_based",
        "fused_recurrent_cyfa",
        "fused_recurrent_gated_oja_rule", "fused_recurrent_iplr_delta_rule",
        "fused_recurrent_lightnet", "fused_recurrent_momentum_delta_rule",
        "fused_recurrent_precond_gated_delta_rule", "fused_recurrent_precond_kda", "parallel_based",
        "parallel_nsa", "parallel_parallax", "parallel_path_attn", "parallel_rebased",
        "parallel_stickbreaking_attn",
        "parallel_wall_attn", "parallel_wall_attn_decode",
    ),
    "ops.attn": ("naive_parallel_attn",),
    "ops.attnres": ("naive_attnres",),
    "ops.comba": ("naive_chunk_comba", "naive_recurrent_comba"),
    "ops.forgetting_attn": ("naive_forgetting_attn",),
    "ops.gdn2": ("naive_chunk_gdn2", "naive_recurrent_gdn2"),
    "ops.gated_delta_rule": (
        "naive_chunk_gated_delta_rule", "naive_recurrent_gated_delta_rule",
    ),
    "ops.utils": (
        "addmm", "chunk_global_cumsum", "chunk_local_cumsum", "logsumexp_fwd", "matmul",
        "mean_pooling", "pack_sequence", "prepare_block_csr",
        "sinkhorn", "softmax_bwd", "softmax_fwd", "softplus", "solve_tril", "unpack_sequence",
    ),
}  # fmt: skip


def make_modules() -> None:
    """Puts every module of the tables into sys.modules, and its names into its parents."""
    paths = {*FUNCTIONS, *MISSING, *(row.path for row in operators.OPERATORS)}
    files = pkgutil.walk_packages(sys.modules[ROOT].__path__, f"{ROOT}.")
    paths |= {file.name.removeprefix(f"{ROOT}.") for file in files}
    for path in sorted(paths):
        _module(path)
    for path, names in MODULES.items():
        for name in names.split():
            setattr(_module("modules"), name, getattr(_module(f"modules.{path}"), name))
    for path in (x for x in paths if x.startswith("ops.utils.")):
        for name, value in vars(_module(path)).items():
            own = getattr(value, "__module__", "") == f"{ROOT}.{path}"
            if own and isinstance(value, FunctionType) and not name.startswith("_"):
                vars(_module("ops.utils")).setdefault(name, value)
    for path, function in FUNCTIONS.items():
        _export(path, function.__name__, function)
    for row in operators.OPERATORS:
        _export(row.path, row.name, adaptor.adapt(row))
    for path, (name, function, signature) in AUTOGRAD.items():
        operator = getattr(_module(path), function)
        vars(_module(path))[name] = adaptor.autograd_function(name, operator, signature)
    for alias, path in sorted(ALIASES.items()):
        module = sys.modules[f"{ROOT}.{alias}"] = _module(path)
        parent, _, child = alias.rpartition(".")
        vars(_module(parent)).setdefault(child, module)
    for path, names in MISSING.items():
        vars(_module(path))["__getattr__"] = missing_names(f"{ROOT}.{path}", names)


def _module(path: str) -> ModuleType:
    """The module of a path, from its file if there is one."""
    name = f"{ROOT}.{path}"
    if name in sys.modules:
        return _as_package(sys.modules[name])
    parent, _, child = path.rpartition(".")
    if parent:
        _module(parent)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        module = sys.modules[name] = ModuleType(name, f"fla.{path}, from Slipstream's tables.")
        setattr(sys.modules[name.rpartition(".")[0]], child, module)
    return _as_package(module)


def _as_package(module: ModuleType) -> ModuleType:
    """It, in which the import system looks for modules: those that are under other names alone."""
    vars(module).setdefault("__path__", [])
    return module


def _export(path: str, name: str, value: Any) -> None:
    while path != "ops":
        vars(_module(path)).setdefault(name, value)
        path = path.rpartition(".")[0]
    vars(_module(path)).setdefault(name, value)

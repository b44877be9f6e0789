"""vLLM's layers of linear attention, each a class derived from vLLM's own and registered for it.

The methods of such a class find vllm_calls' functions under the names that they call, so its
batches, pools, drafts and shares of heads stay those of the release. A batch in which every
sequence decodes one token goes through one launch in their place: convolution, state, norm.

A call that is not served goes to vLLM's function, and a layer that does not fit stays vLLM's:
slipstream.integrations.report() says which and why.
"""

import builtins
import inspect
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from slipstream.integrations import usage, vllm, vllm_calls, vllm_steps

_DECORATOR = "eager_break_during_capture"
_PLATFORMS = "is_rocm", "is_xpu", "is_cpu"
_KINDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
custom_op: Any = import_module("vllm.model_executor.custom_op")

_CONVOLUTION = {"causal_conv1d_fn": vllm_calls.causal_conv1d_fn}
_DELTA_ATTENTION = {
    **dict.fromkeys(("chunk_kda", "chunk_kda_with_fused_gate"), vllm_calls.chunk_delta_attention),
    **dict.fromkeys(("fused_recurrent_kda", "fused_recurrent_kda_fwd"), vllm_calls.recurrent),
}
_LIGHTNING = {
    "clear_linear_attention_cache_for_new_sequences": vllm_calls.clear_new_sequences,
    "linear_attention_prefill_and_mix": vllm_calls.lightning_prefill_and_mix,
    "linear_attention_decode": vllm_calls.lightning_decode,
    "bailing_linear_attention_decode_spec": vllm_calls.lightning_decode,
}


class Layer(NamedTuple):
    """A class of vLLM, below vllm.model_executor.

    calls: what its methods call by name. core, step: its method between the projections, and what
    takes a batch that decodes in its place. extend: the class with more of its own.
    """

    module: str
    name: str
    calls: dict[str, Callable]
    core: str = ""
    step: Callable[..., None] | None = None
    extend: Callable[[Any, Any], type] | None = None


def register() -> None:
    """Registers each layer that this release has and that fits."""
    platform = import_module("vllm.platforms").current_platform
    for layer in LAYERS:
        try:
            if any(getattr(platform, x)() for x in _PLATFORMS):
                raise NotImplementedError("the platform is not CUDA")
            derived = _derived(layer)
            _registry(derived).register_oot(name=layer.name)(derived)
        except Exception as error:
            usage.refuse(f"vllm {layer.name}", error)


def _registry(layer: type) -> Any:
    """Both register by the name of the class, in one table."""
    for registry in (custom_op.PluggableLayer, custom_op.CustomOp):
        if issubclass(layer, registry):
            return registry
    raise NotImplementedError("it is neither a PluggableLayer nor a CustomOp")


def _derived(layer: Layer) -> type:
    """
    Raises:
        ImportError, AttributeError: the release has no such class. NotImplementedError: it calls
            the functions otherwise.
    """
    module = import_module(f"vllm.model_executor.{layer.module}")
    theirs = getattr(module, layer.name)
    _registry(theirs)
    methods, called = {}, set()
    for name, method in vars(theirs).items():
        if not isinstance(method, FunctionType):
            continue
        plain = inspect.unwrap(method)
        found = _called_by(plain, layer.calls)
        if not found:
            continue
        called |= found
        ours = _rebound(plain, {x: layer.calls[x] for x in found}, layer.name)
        if name == layer.core and layer.step is not None:
            ours = _or_step(ours, vllm_steps.counted(layer.name, layer.step))
        # the decorator of vLLM's methods, which ends the capture of a graph
        methods[name] = ours if plain is method else plain.__globals__[_DECORATOR](ours)
    if not called:
        raise NotImplementedError(f"it calls none of {', '.join(layer.calls)}")
    for name in called:
        usage.site("vllm", f"{layer.name}.{name}")
    derived = type(layer.name, (theirs,), {**methods, "__module__": __name__})
    return derived if layer.extend is None else layer.extend(derived, module)


def _called_by(method: FunctionType, calls: dict[str, Callable]) -> set[str]:
    """Names among calls in a method's code and in that of its functions."""
    codes = [method.__code__]
    names: set[str] = set()
    for code in codes:
        names |= set(code.co_names) & set(calls)
        codes += [x for x in code.co_consts if isinstance(x, type(code))]
    return names


def _rebound(method: FunctionType, calls: dict[str, Callable], site: str) -> FunctionType:
    """The method with our functions under the names that it finds in its module, or imports when
    it is called."""

    @lru_cache(1024)
    def late(name: str, theirs: Callable) -> Callable:
        try:
            return _or_theirs(calls[name], theirs, f"{site}.{name}")
        except NotImplementedError as error:
            usage.refuse(f"vllm {site}", error)
            return theirs

    def importing(name: str, *args: Any) -> Any:
        module, names = builtins.__import__(name, *args), args[2] if len(args) > 2 else ()
        if calls.keys().isdisjoint(names or ()):
            return module
        members = {x: getattr(module, x) for x in names}
        return SimpleNamespace(**{x: late(x, f) if x in calls else f for x, f in members.items()})

    names = dict(method.__globals__)
    for name in calls.keys() & names:
        names[name] = _or_theirs(calls[name], names[name], f"{site}.{name}")
    names["__builtins__"] = {**vars(builtins), "__import__": importing}
    made = FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    made.__kwdefaults__ = method.__kwdefaults__
    return made


def _or_theirs(ours: Callable, theirs: Callable, site: str) -> Callable:
    """Ours, and theirs for the calls that it refuses.

    Raises:
        NotImplementedError: theirs has an argument that ours has not, or others' order.
    """
    parameters = inspect.signature(theirs).parameters.values()
    named = [x for x in parameters if x.kind not in _KINDS]
    known = inspect.signature(ours).parameters
    if missing := [x.name for x in named if x.name not in known]:
        raise NotImplementedError(f"{site}: slipstream knows it without {', '.join(missing)}")
    by_place = [x.name for x in named if _is_by_place(x) and _is_by_place(known[x.name])]
    if by_place != [x for x in known if x in by_place]:
        raise NotImplementedError(f"{site}: slipstream knows its arguments in another order")
    counted = usage.counted("vllm", site)(ours)

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return counted(*args, **kwargs)
        except NotImplementedError:
            return theirs(*args, **kwargs)

    return call


def _is_by_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _or_step(method: FunctionType, step: Callable[..., None]) -> Callable:
    @wraps(method)
    def core(self: Any, *args: Any, **kwargs: Any) -> None:
        vllm_steps.warm_up(self, partial(core, self), *args, **kwargs)
        if not vllm_steps.stepped(self, step, *args, **kwargs):
            method(self, *args, **kwargs)

    return core


_MAMBA = "layers.mamba"
LAYERS = (
    Layer(
        f"{_MAMBA}.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention",
        {
            **_CONVOLUTION,
            "fi_chunk_gated_delta_rule": vllm_calls.chunk_delta_rule,
            "fused_sigmoid_gating_delta_rule_update": vllm.delta_rule_update,
        },
        extend=vllm_steps.delta_net,
    ),
    Layer(
        f"{_MAMBA}.gdn.olmo_gdn_linear_attn",
        "OlmoHybridGatedDeltaNetAttention",
        {
            **_CONVOLUTION,
            "chunk_gated_delta_rule": vllm_calls.chunk_delta_rule,
            "fused_recurrent_gated_delta_rule": vllm_calls.recurrent,
        },
        "_forward_core",
        vllm_steps.delta_net_step,
    ),
    Layer(
        f"{_MAMBA}.gdn.kimi_gdn_linear_attn",
        "KimiGatedDeltaNetAttention",
        {**_CONVOLUTION, **_DELTA_ATTENTION},
        "_forward",
        vllm_steps.delta_attention_step,
        vllm_steps.delta_attention,
    ),
    Layer(
        "models.bailing_moe_v3",
        "BailingMoeV3KimiDeltaAttention",
        {**_CONVOLUTION, **_DELTA_ATTENTION},
        "_forward",
        vllm_steps.delta_attention_step,
    ),
    Layer(
        f"{_MAMBA}.mamba_mixer2",
        "MambaMixer2",
        {
            **_CONVOLUTION,
            "mamba_chunk_scan_combined_varlen": vllm_calls.mamba_chunk_scan_combined_varlen,
        },
        extend=vllm_steps.mamba2,
    ),
    Layer(
        f"{_MAMBA}.mamba_mixer",
        "MambaMixer",
        {**_CONVOLUTION, "selective_scan_fn": vllm_calls.selective_scan_fn},
    ),
    Layer(f"{_MAMBA}.short_conv", "ShortConv", _CONVOLUTION),
    Layer(f"{_MAMBA}.linear.minimax_linear_attn", "MiniMaxText01LinearAttention", _LIGHTNING),
    Layer(f"{_MAMBA}.linear.bailing_linear_attn", "BailingMoELinearAttention", _LIGHTNING),
)

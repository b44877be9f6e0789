"""patch(): the linear layers of transformers' models run Slipstream's operators.

transformers decorates the functions of such layers (use_kernel_func_from_hub_with_fallback): a
function of fla, causal_conv1d or mamba_ssm if that is installed when the module is imported, else
plain torch. A layer looks them up among the globals of its module whenever it runs. patch() finds
the decorated functions by what the decorator leaves in their closures, and puts those of
linear_mixers.FUNCTIONS in their place; a finder does it for modules that are imported later. Gated
norms are found by their arguments, and replaced if ours gives the same numbers. Packed sequences
are kept apart whatever transformers is told of them (seq_idx, offsets, or position_ids that fall
back): forward of a model and of its layers is wrapped, and hands it down. torch's checkpoints,
which run a part of a model again in the backward pass, keep it for that part (AROUND).
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.integrations import auto_models, class_mixers, linear_mixers, rows, usage
from slipstream.integrations.hyper_connections import code_of, hyper_connected
from slipstream.integrations.linear_mixers import FUNCTIONS, running, sequences_of
from slipstream.ops.norm import rms_norm_gated

MODELING = re.compile(r"transformers\.models\.[\w.]+\.modeling_\w+")
LIBRARY = "transformers"  # in usage.report()
# attributes of what is put in place: what was there, and whether it takes seq_idx and REAL
ORIGINAL, TELLS, REAL = "slipstream_original", "slipstream_tells", "slipstream_real"

logger = logging.getLogger(__name__)


def patch(model: nn.Module | None = None) -> list[str]:
    """Puts Slipstream's operators into the linear layers of transformers' models.

    Gated delta rule, KDA, Mamba-2, Mamba-1's scan, short convolutions and gated norms, wherever a
    model looks up functions of fla, causal_conv1d or mamba_ssm, and classes of class_mixers.py and
    hyper_connections.py. A call that slipstream does not take goes to transformers' own function,
    which a warning says once. Softmax attention is apart: attn_implementation="slipstream".

    Args:
        model: only the modules that its layers come from, already imported; None is all models of
            transformers, loaded before or after. Functions are those of a module, so other models
            of the same kind are patched too.

    Returns:
        What was replaced, by its full name; nothing that was already.
    """
    if model is None:
        names = [name for name in list(sys.modules) if MODELING.fullmatch(name)]
        _Finder.put()
    else:
        names = sorted({cls.__module__ for m in model.modules() for cls in type(m).__mro__})
    for cls, name, make in AROUND:
        call = getattr(cls, name)
        if not hasattr(call, ORIGINAL):
            replacement = make(call)
            setattr(replacement, ORIGINAL, vars(cls).get(name, call))
            setattr(cls, name, replacement)
    found = (sys.modules.get(name) for name in names)
    return [name for module in found if module is not None for name in _patch_module(module)]


def unpatch() -> None:
    """Puts back what patch() replaced, everywhere."""
    _Finder.take()
    usage.remove(LIBRARY)
    for cls, name, _ in AROUND:
        call = getattr(cls, name)
        if hasattr(call, ORIGINAL):
            setattr(cls, name, getattr(call, ORIGINAL))
    for name, module in list(sys.modules.items()):
        if module is None or not MODELING.fullmatch(name):
            continue
        for attribute, value in list(vars(module).items()):
            if hasattr(value, ORIGINAL):
                setattr(module, attribute, getattr(value, ORIGINAL))
            elif inspect.isclass(value):
                _put_back(value)


def _put_back(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if not hasattr(method, ORIGINAL):
            continue
        if (before := getattr(method, ORIGINAL)) is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _patch_module(module: ModuleType) -> list[str]:
    """Replaces what is in a module, if anything in it is looked up in those packages."""
    found = {attribute: (looked_up(f), f) for attribute, f in vars(module).items()}
    functions = {a: (name, f) for a, (name, f) in found.items() if name in FUNCTIONS}
    ours = {
        cls: forward for cls in _classes_of(module) if not hasattr(cls.forward, ORIGINAL)
        and (forward := class_mixers.FORWARDS.get(cls.__name__) or hyper_connected(cls))
    }  # fmt: skip
    mixers = any(cls.__name__ in class_mixers.FORWARDS for cls in ours)
    if not functions and not ours:
        return []
    for attribute, (name, function) in functions.items():
        full = f"{module.__name__}.{attribute}"
        setattr(module, attribute, replacement_of(FUNCTIONS[name], function, full))
    replaced = list(functions)
    for cls in _classes_of(module) if functions or mixers else ours:
        forward = _forward_of(cls, set(functions), mixers, ours.get(cls))
        if forward is not None:
            setattr(forward, ORIGINAL, cls.forward)
            cls.forward = forward
            if _is_checkpoint(getattr(forward, ORIGINAL)):
                GradientCheckpointingLayer.__init_subclass__.__func__(cls)  # around ours
            replaced.append(f"{cls.__name__}.forward")
    for name, attribute, method in class_mixers.METHODS:
        cls = vars(module).get(name)
        if mixers and cls is not None and attribute not in vars(cls):
            setattr(method, ORIGINAL, None)
            setattr(cls, attribute, method)
            replaced.append(f"{name}.{attribute}")
    names = [f"{module.__name__}.{name}" for name in replaced]
    logger.info("slipstream: replaced %s", ", ".join(names))
    return names


def looked_up(function: Any) -> str | None:
    """The name under which transformers looked a function up in another package, if it did."""
    if isinstance(function, nn.Module):  # what the package `kernels` makes of it
        return getattr(type(function), "kernel_layer_name", None)
    code = getattr(function, "__code__", None)
    if code is None or "is_new_implementation" not in code.co_freevars:
        return None
    return inspect.getclosurevars(function).nonlocals.get("func_name")


def _classes_of(module: ModuleType) -> Iterator[type[nn.Module]]:
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__module__ == module.__name__ and (
            issubclass(value, nn.Module) and "forward" in vars(value)
        ):  # fmt: skip
            yield value


def _forward_of(
    cls: type[nn.Module], functions: set[str], padded: bool, ours: Callable | None
) -> Callable | None:
    """Another forward for a class of a patched module, or None if it stays.

    functions: the names of what is replaced in the module. padded: its layers ask what is padding.
    """
    if issubclass(cls, PreTrainedModel):
        return _model_forward(cls.forward, padded)
    if issubclass(cls, GradientCheckpointingLayer):
        forward = cls.forward.__wrapped__ if _is_checkpoint(cls.forward) else cls.forward
        return _layer_forward(forward, ours or forward)
    if ours is not None:
        return replacement_of(ours, cls.forward, f"{cls.__module__}.{cls.__name__}")
    if functions & {*code_of(cls.forward).co_names}:
        return _mixer_forward(cls.forward)
    return _apart(cls.forward) if _mixes(cls) else _gated_norm(cls)


def _is_checkpoint(forward: Any) -> bool:
    """Whether it is what newer transformers put around forward of a layer: it checkpoints a layer
    whose forward it is, and none that has another around it."""
    return getattr(forward, "__code__", code_of.__code__).co_name == "forward_with_checkpointing"


def replacement_of(ours: Callable, theirs: Callable, full: str) -> Callable:
    """ours, or theirs where ours does not take the call. full: the name with that of its module."""
    if ours is not linear_mixers.not_fused:
        usage.site(LIBRARY, full)
    parameters = inspect.signature(ours).parameters
    # what transformers' own function reads and ours does not, with its default
    unread = {
        name: p.default
        for name, p in inspect.signature(getattr(theirs, "forward", theirs)).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
        and name not in parameters
        and ours is not linear_mixers.not_fused
    }

    def refused(why: object) -> None:
        if usage.site(LIBRARY, full).refuse(why):
            name = full.rpartition(".")[2]
            logger.warning("slipstream: transformers' own %s runs: %s", name, why)

    @wraps(theirs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return theirs(*args, **kwargs)
        for name, default in unread.items():
            if kwargs.get(name, default) is not default:
                if not torch.compiler.is_compiling():
                    refused(f"{name}: ours does not read it")
                return theirs(*args, **kwargs)
        if torch.compiler.is_compiling() or ours is linear_mixers.not_fused:
            return ours(*args, **kwargs)
        try:
            result = ours(*args, **kwargs)
        except usage.REFUSALS as error:
            if is_packed(kwargs):  # transformers' own would mix the sequences
                usage.site(LIBRARY, full).refuse(error)
                raise
            refused(error)
            return theirs(*args, **kwargs)
        usage.site(LIBRARY, full).count()
        return result

    setattr(replacement, ORIGINAL, theirs)
    return replacement


# packed sequences


def is_packed(kwargs: dict[str, Any]) -> bool:
    offsets = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "context", *linear_mixers.TREE_FIELDS)
    return running.now.of_layer is not None or any(kwargs.get(name) is not None for name in offsets)


def _sequences_of_positions(given: dict[str, Any]) -> Tensor | None:
    """seq_idx [B, T] where position_ids [B, T] fall back and nothing else says what is packed.

    transformers' own masks do not look at them beside an attention_mask or a cache.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    cached = any(given.get(name) is not None for name in ("cache", "past_key_values"))
    if mask is None:
        return linear_mixers.sequences_of_positions(positions, counted=not cached)
    if not isinstance(positions, Tensor) or not isinstance(mask, Tensor):
        return None
    if mask.dim() != 2 or mask.shape[1] != positions.shape[-1]:
        return None
    return linear_mixers.sequences_of_positions(positions, mask.bool())


def _model_forward(forward: Callable, padded: bool) -> Callable:
    """forward of a model, which tells its layers what is packed, whatever it hands on to them, and
    what is padding if they ask."""
    names = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def replacement(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        outer = running.now.of_model, running.now.real_of_model
        given = dict(zip(names, args)) | kwargs
        tokens = given.get("inputs_embeds" if given.get("input_ids") is None else "input_ids")
        seq_idx = None
        if padded and given.get("attention_mask") is not None:
            running.now.real_of_model = rows.padding_of(given["attention_mask"], tokens)
        if isinstance(tokens, Tensor) and is_packed(given):
            seq_idx = running.now.of_model = sequences_of(given, *tokens.shape[:2])
        elif (seq_idx := _sequences_of_positions(given)) is not None:
            number = len(tokens) if isinstance(tokens, Tensor) else len(seq_idx)
            running.now.of_model = seq_idx.expand(number, -1)
        try:
            if seq_idx is not None and (table := _one_table(given.get("position_ids"))) is not None:
                return forward(self, **given | {"position_ids": table})
            return forward(self, *args, **kwargs)
        finally:
            running.now.of_model, running.now.real_of_model = outer

    return replacement


def _one_table(positions: Any) -> Tensor | None:
    """[B, T] of equal tables [R, B, T], of which models make no masks of packed sequences; of four
    the first is that of the text."""
    if not isinstance(positions, Tensor) or positions.dim() != 3 or len(positions) == 4:
        return None
    return None if linear_mixers.is_unreadable(positions) else linear_mixers.text_table(positions)


def _layer_call(call: Callable) -> Callable:
    """__call__ of transformers' layers: what is packed is an argument of a layer from here on, for
    functions of checkpointing that are not torch's."""

    @wraps(call)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if hasattr(type(self).forward, TELLS):
            now = running.now
            for name, given in (("seq_idx", now.of_model), (REAL, now.real_of_model)):
                if given is not None:
                    kwargs.setdefault(name, given)
        return call(self, *args, **kwargs)

    return replacement


def _checkpoint_call(call: Callable) -> Callable:
    """The place where torch takes the function that a checkpoint runs again."""

    @wraps(call)
    def replacement(owner: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return call(owner, linear_mixers.captured(function), *args, **kwargs)

    return replacement


# what runs around layers, and how it is wrapped: all checkpoints of torch pass through two classes
AROUND: tuple[tuple[type, str, Callable[[Callable], Callable]], ...] = (
    (GradientCheckpointingLayer, "__call__", _layer_call),
    (Cache, "reorder_cache", class_mixers.cache_call),
    (Cache, "reset", class_mixers.cache_call),
    (checkpoint.CheckpointFunction, "forward", _checkpoint_call),
    (checkpoint._CheckpointFrame, "__init__", _checkpoint_call),
)


def _layer_forward(forward: Callable, ours: Callable) -> Callable:
    """ours for a layer's forward: its functions find in running.now what it does not tell."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters][1:]
    open_ended = any(p.kind is p.VAR_KEYWORD or p.name == "seq_idx" for p in parameters)

    @wraps(forward)
    def replacement(
        self: nn.Module, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any
    ) -> Any:
        outer = running.now.of_layer, running.now.real_of_layer
        running.now.real_of_layer = kwargs.pop(REAL, outer[1])
        if seq_idx is not None:
            running.now.of_layer = seq_idx
            if open_ended:
                kwargs["seq_idx"] = seq_idx
        if ours is not forward:  # which has names, not a release's order
            args, kwargs = (), dict(zip(names, args)) | kwargs
        run = forward if torch.compiler.is_exporting() else ours
        try:
            return run(self, *args, **kwargs)
        finally:
            running.now.of_layer, running.now.real_of_layer = outer

    setattr(replacement, TELLS, True)
    return replacement


CACHES = ("cache", "cache_params", "past_key_values")  # by the release


def _mixer_forward(forward: Callable) -> Callable:
    """forward of a module that calls functions, which find in `running` what it does not tell them;
    of a mask it gets the columns of its tokens, where the cache has some before them."""
    names = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = running.now.mixer, running.now.cache, running.now.scans
        given = dict(zip(names, args)) | kwargs
        mask, tokens = given.get("attention_mask"), given[names[0]].shape[1]
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > tokens:
            given["attention_mask"] = mask[:, -tokens:]
        running.now.mixer, running.now.scans = self, 0
        running.now.cache = next((given[x] for x in CACHES if given.get(x) is not None), None)
        try:
            return forward(self, **given)
        finally:
            running.now.mixer, running.now.cache, running.now.scans = outer

    return replacement


def _mixes(cls: type[nn.Module]) -> bool:
    """Whether a class is a short convolution in plain torch that ignores packed sequences, such as
    transformers 5.23's Inkling2DynamicShortConvolution."""
    code = code_of(cls.forward)
    read = {*code.co_names, *code.co_consts, *code.co_varnames}
    return (
        "conv_kernel_size" in inspect.signature(cls.__init__).parameters
        and "conv_mask" in inspect.signature(cls.forward).parameters
        and not read & {"seq_idx", *FUNCTIONS}
    )


def _apart(forward: Callable) -> Callable:
    """The forward of such a class on packed sequences with its width - 1 zeros between them."""

    @wraps(forward)
    def replacement(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        B, T = hidden_states.shape[:2]
        seq_idx = sequences_of(kwargs, B, T)
        if seq_idx is None or seq_idx.shape != (B, T):
            return forward(self, hidden_states, *args, **kwargs)
        gap = self.conv_kernel_size - 1
        before = nn.functional.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1), (1, 0))
        most = before.max()  # rows of fewer sequences begin with zeros
        token = torch.arange(T, device=seq_idx.device) + gap * (before + most - before[:, -1:])
        at = torch.arange(B, device=seq_idx.device)[:, None], token
        length = T + gap * int(most)

        def spread(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape[:2] != (B, T):
                return x
            return x.new_zeros(B, length, *x.shape[2:]).index_put(at, x)

        kwargs = {name: spread(x) for name, x in kwargs.items()}
        return forward(self, spread(hidden_states), *map(spread, args), **kwargs)[at]

    return replacement


# gated norms


def _gated_norm(cls: type[nn.Module]) -> Callable | None:
    """forward of a root mean square norm with an output gate, if ours gives its numbers."""
    forward = cls.forward
    if list(inspect.signature(forward).parameters)[1:] != ["hidden_states", "gate"]:
        return None
    for activation in ("silu", "sigmoid"):
        for before in (True, False):
            if _same_numbers(cls, _gated_forward(forward, activation, before, rms_norm_gated)):
                full = f"{cls.__module__}.{cls.__name__}"
                usage.site(LIBRARY, full)
                counted = usage.counted(LIBRARY, full)
                return _gated_forward(forward, activation, before, counted(rms_norm_gated))
    return None


def _gated_forward(
    theirs: Callable, activation: str, norm_before_gate: bool, norm: Callable
) -> Callable:
    @wraps(theirs)
    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or gate.shape != hidden_states.shape or torch.compiler.is_exporting():
            return theirs(self, hidden_states, gate)
        groups = getattr(self, "n_groups", 1)
        size = getattr(self, "group_size", hidden_states.shape[-1] // groups)
        return norm(
            hidden_states,
            gate,
            self.weight,
            eps=self.variance_epsilon,
            activation=activation,
            norm_before_gate=getattr(self, "norm_before_gate", norm_before_gate),
            group_size=size,
        )

    return forward


def _same_numbers(cls: type[Any], ours: Callable) -> bool:
    """Whether ours is forward of a class, by small modules of every kind that its options make."""
    size, sizes = 8, {"hidden_size": 8, "group_size": 4, "n_groups": 2, "eps": 0.1}
    parameters = inspect.signature(cls.__init__).parameters
    options = {name: value for name, value in sizes.items() if name in parameters}
    flags = [n for n, p in parameters.items() if isinstance(p.default, bool)]
    generator = torch.Generator("cpu").manual_seed(0)
    weight, *inputs = torch.randn(3, 2, size, generator=generator, device="cpu")
    try:
        for on in (False, True):
            with torch.device("cpu"), torch.no_grad():
                module = cls(**options, **dict.fromkeys(flags, on))
                module.weight.copy_(weight[0])
                got, want = ours(module, *inputs), cls.forward(module, *inputs)
            if not torch.allclose(got, want, rtol=1e-4, atol=1e-5):
                return False
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


# modules that are imported later


class _Finder(MetaPathFinder):
    """Patches transformers' modeling modules as they are imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if not MODELING.fullmatch(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = auto_models.ThenCall(spec.loader, _patch_module)
        return spec

    @classmethod
    def put(cls) -> None:
        cls.take()
        sys.meta_path.insert(0, cls())

    @classmethod
    def take(cls) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]

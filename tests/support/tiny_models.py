"""Tiny random models of transformers' classes under "slipstream" and "sdpa" beside "eager"."""

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

import slipstream
from slipstream.integrations.transformers import NAME
from tests.support.tiny_configs import OTHERS, tiny_config
from tests.support.tiny_inputs import inputs_of, with_images

OURS = Path(slipstream.__file__).parent
LARGEST = 40_000_000  # parameters
TOLERANCE = 2e-3  # of the largest entry of eager's result


class Comparison(NamedTuple):
    """outcome: "matches", "own attention", "refused", "differs" or "not run"."""

    outcome: str
    why: str = ""


def classes() -> dict[str, tuple[str, str]]:
    """Name of a class -> its model type and the mapping that lists it, in the order of use."""
    found: dict[str, tuple[str, str]] = {}
    names = [n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("MAPPING_NAMES")]
    first = ["MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_MAPPING_NAMES"]
    names.sort(key=lambda n: next((i for i, x in enumerate(first) if n.startswith(x)), len(first)))
    for mapping in names:
        for model_type, listed in getattr(modeling_auto, mapping).items():
            for name in (listed,) if isinstance(listed, str) else listed:
                found.setdefault(name, (model_type, mapping))
    return found


def first_of_each_type(mapping: str = "") -> list[str]:
    """One class of each model type that mappings of a name with `mapping` in it list."""
    first: dict[str, str] = {}
    for name, (model_type, listed) in classes().items():
        if mapping in listed:
            first.setdefault(model_type, name)
    return list(first.values())


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a model's output; not caches and attention weights."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif hasattr(output, "items"):
        for key, value in output.items():
            if "attention" not in key and "past" not in key and "cache" not in key:
                yield from tensors_of(value, f"{name}.{key}" if name else key)
    elif isinstance(output, list | tuple):
        for i, value in enumerate(output):
            yield from tensors_of(value, f"{name}[{i}]")


def runs_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Results by name of a forward and backward pass, a padded one, and of generation."""
    found: dict[str, dict[str, Tensor]] = {}
    torch.manual_seed(1)
    outputs = dict(tensors_of(model(**inputs)))
    found["forward"] = {name: x.detach() for name, x in outputs.items()}
    differentiable = [x for x in outputs.values() if x.requires_grad]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if differentiable:
        torch.manual_seed(2)
        total = sum((x.float() * torch.randn(x.shape)).sum() for x in differentiable)
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        found["backward"] = {n: g for n, g in zip(parameters, grads) if g is not None}
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        for side in ("left", "right"):
            mask = torch.ones_like(inputs["input_ids"])
            mask[1, ..., slice(0, 4) if side == "left" else slice(-4, None)] = 0
            torch.manual_seed(3)
            with torch.no_grad():
                output = dict(tensors_of(model(**inputs, attention_mask=mask)))
            live = mask.bool()
            # a decoder's tokens are not padded, only what it reads
            found[f"{side} padding"] = {
                name: x[live] if x.shape[:2] == live.shape else x
                for name, x in output.items()
                if x.shape[:1] == live.shape[:1]
                and (x.shape[1:2] == live.shape[1:] or "decoder_input_ids" in inputs)
            }
    if model.can_generate() and "input_ids" in inputs and len(inputs) == 1:
        torch.manual_seed(4)
        result = model.generate(
            inputs["input_ids"], max_new_tokens=3, min_new_tokens=3, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
            attention_mask=torch.ones_like(inputs["input_ids"]), disable_compile=True,
        )  # fmt: skip
        found["generate"] = {f"logits[{i}]": x for i, x in enumerate(result.logits)}
    return found


def difference(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> str:
    """The difference, or ""."""
    for run, results in want.items():
        # gradients of single weights may be nothing but rounding
        top = max((float(x.abs().max()) for x in results.values() if x.numel()), default=0.0)
        for name, x in results.items():
            y = got[run].get(name)
            if y is None or y.shape != x.shape:
                return f"{run}: {name} has another shape"
            if not x.numel():
                continue
            both = torch.isfinite(x) & (x.abs() < 1e30)
            if bool((torch.isfinite(y) & (y.abs() < 1e30) != both).any()):
                return f"{run}: {name} is not finite where eager's is, or the reverse"
            error = float((x - y)[both].abs().max()) if bool(both.any()) else 0.0
            scale = top if run == "backward" else float(x[both].abs().max()) if both.any() else 1.0
            if error > TOLERANCE * max(scale, 1e-3):
                return f"{run}: {name} off by {error:.2g} of {scale:.2g}"
    return ""


def build(cls: Any, config: PreTrainedConfig, impl: str, weights: Any) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=impl).eval().float()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:150] if lines else ''}"


def frames_of_ours(error: BaseException) -> bool:
    """Whether it was raised by slipstream, or by what slipstream called."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(x.filename).is_relative_to(OURS) for x in frames)


def counted(impl: str, calls: list[int]) -> tuple[Callable, Callable]:
    """The registered function, and the same counting its calls."""
    function = AttentionInterface._global_mapping[impl]

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return function(*args, **kwargs)

    return function, count


def compare(name: str, impls: tuple[str, ...] = (NAME, "sdpa")) -> dict[str, Comparison]:
    """By implementation: does a class of models give what it gives with "eager"?"""
    errors = []
    for other in OTHERS:
        try:
            made = eager_runs(name, other)
        except Exception as error:  # transformers' own, of any kind
            if frames_of_ours(error):
                raise
            errors.append(reason(error))
            continue
        return {impl: compared(*made, impl) for impl in impls}
    return dict.fromkeys(impls, Comparison("not run", errors[0]))


def eager_runs(name: str, other: dict[str, Any]) -> tuple[Any, PreTrainedConfig, Any, Any, Any]:
    """The class, its configuration, weights, inputs, and results with "eager"."""
    cls = getattr(transformers, name)
    config_class = cls.config_class or getattr(
        transformers, configuration_auto.CONFIG_MAPPING_NAMES[classes()[name][0]]
    )
    config = tiny_config(config_class, other)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotImplementedError(f"{size / 1e6:.0f} million parameters")
    eager = build(cls, config, "eager", None)
    with torch.no_grad():
        for p in eager.parameters():
            if p.dim() >= 2 and p.is_floating_point():
                p.normal_(0, min(0.25, 1.5 * p.shape[-1] ** -0.5))
    inputs = inputs_of(eager, config)
    try:
        want = runs_of(eager, inputs)
    except (ValueError, AttributeError, TypeError):
        inputs = with_images(inputs, config)
        want = runs_of(eager, inputs)
    torch.manual_seed(1)
    with torch.no_grad():
        again = dict(tensors_of(eager(**inputs)))
    if different := difference({"forward": again}, {"forward": want["forward"]}):
        raise NotImplementedError(f"two runs of it differ: {different}")
    return cls, config, eager.state_dict(), inputs, want


def compared(
    cls: Any, config: PreTrainedConfig, weights: Any, inputs: Any, want: Any, impl: str
) -> Comparison:
    calls = [0]
    function, count = counted(impl, calls)
    AttentionInterface._global_mapping[impl] = count
    try:
        got = runs_of(build(cls, config, impl, weights), inputs)
    except (NotImplementedError, ValueError) as error:
        if not frames_of_ours(error):
            raise
        return Comparison("refused", reason(error))
    finally:
        AttentionInterface._global_mapping[impl] = function
    if different := difference(got, want):
        return Comparison("differs", different)
    return Comparison("matches" if calls[0] else "own attention")

"""Finds the kernels of a model's training step from its configuration, without a GPU."""

import copy
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.trace import trace
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.runtime.files import read_json
from slipstream.tools.backend_query import KernelsFound


def read(name: str) -> SlipstreamConfig:
    """The configuration in a saved model's folder, its config.json or a run's YAML file.

    Raises:
        ValueError: there is no such file, or it is no configuration of a Slipstream model.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: want a model's folder, its config.json or a run's YAML file")
    if path.suffix != ".json":
        from slipstream.training.config import load

        run = load(path)
        if run.init_from is not None:
            return read(run.init_from)
        return SlipstreamConfig(**{"vocab_size": run.tokenizer.vocab_size, **run.model})
    found = read_json(path)
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind != SlipstreamConfig.model_type:
        raise ValueError(f"{path}: want model_type {SlipstreamConfig.model_type!r}, got {kind!r}")
    return SlipstreamConfig.from_pretrained(str(path))


def find_model_kernels(
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    batch: tuple[int, int],
    arch: str,
    backward: bool = True,
) -> KernelsFound:
    """The kernels of a training step of these models, with weights of each dtype, for this batch of
    rows and tokens, for as many packed sequences, and for any other sizes. With backward=False, the
    kernels of the loss alone.

    Raises:
        ValueError: as `read`.
    """
    found = KernelsFound([], {}, [])
    jobs: dict[str, Job] = {}
    wanted: dict[str, list[str]] = {}
    for name in names:
        config = read(name)
        for dtype, packed in product(dtypes, (False, True)):
            for job in trace_model(config, dtype, batch, arch, backward, packed, any_size=True):
                jobs[job.key] = job
                if name not in wanted.setdefault(job.key, []):
                    wanted[job.key].append(name)
    found.tasks.extend((job, tuple(wanted[key])) for key, job in jobs.items())
    return found


def trace_model(
    config: SlipstreamConfig,
    dtype: torch.dtype,
    batch: tuple[int, int],
    arch: str,
    backward: bool,
    packed: bool = False,
    any_size: bool = False,
) -> list[Job]:
    """The kernels of two blocks of each kind: the first block may have some of its own.

    Args:
        packed: the rows of the batch follow each other in one.
        any_size: those of any other batch, too.
    """
    with torch.device("meta"):
        model: Any = SlipstreamForCausalLM(_two_of_each(config))
    model.to(dtype).train(backward)

    def call(device: torch.device) -> Any:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, x in tensors.items():
                    if x is not None:
                        like: Any = torch.empty(x.shape, dtype=x.dtype, device=device)
                        tensors[key] = like
        (B, T), options = batch, {}
        ids = torch.empty((1, B * T) if packed else batch, dtype=torch.int64, device=device)
        if packed:
            options["cu_seqlens"] = torch.empty(B + 1, dtype=torch.int32, device=device)
        return model(input_ids=ids, labels=ids, use_cache=False, skip_logits=True, **options).loss

    with warnings.catch_warnings():
        # of fake tensors' addresses, which are only compared
        warnings.simplefilter("ignore", UserWarning)
        return trace(call, arch, backward, any_size=any_size)


def _two_of_each(config: SlipstreamConfig) -> SlipstreamConfig:
    """A copy of the configuration with at most two blocks of each kind."""
    kinds: dict[str, int] = {}
    layers = []
    for i in range(config.num_hidden_layers):
        kind = repr((config.mixer(i), config.mlp(i)))
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= 2:
            layers.append(i)
    small = copy.deepcopy(config)
    assert config.mixers is not None
    small.mixers = [config.mixers[i] for i in layers]
    small.mlps = None if config.mlps is None else [config.mlps[i] for i in layers]
    return small

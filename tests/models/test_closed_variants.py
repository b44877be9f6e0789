"""After a model's first step no size of a later one asks for another kernel variant: in training on
rows and on packed sequences, in prompts, and in the token after them."""

import warnings
import zlib
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.trace import trace
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from tests.support import wants

pytestmark = wants.compiler
MIXERS = (
    *("gated_deltanet", "kda", "gla", "mamba2", "rwkv7", "retention", "gsa", "hgrn", "attention"),
    *("delta_net", "mla"),
)
WAYS = ("rows", "packed", "prompt")
# Their heads are divided for sm_90's kernels in chunks and not token by token, as short prompts go:
# the first prompt beyond or below this compiles what those before did not.
DIVIDED, SHORT = {"mamba2", "retention"}, 16
SIZES = 4


class Batch(NamedTuple):
    """Tokens of B rows of T; sequences: how many one row packs."""

    B: int
    T: int
    sequences: int


def random_batch(random: Random, way: str, shortest: int) -> Batch:
    def power(most: float) -> int:
        return round(2 ** random.uniform(0, most))

    if way == "packed":
        return Batch(1, tokens := 64 + power(14.5), min(tokens, power(8.2)))
    rows = power(6 if way == "rows" else 5)
    return Batch(rows, max(shortest, min(power(14), 40000 // rows)), 0)


def variants(model: Any, way: str, batch: Batch, any_size: bool = False) -> dict[str, Job]:
    def call(device: torch.device) -> Any:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, x in tensors.items():
                    if x is not None:
                        tensors[key] = torch.empty(x.shape, dtype=x.dtype, device=device)
        ids = torch.empty(batch[:2], dtype=torch.int64, device=device)
        if way == "prompt":
            cache = model(input_ids=ids, use_cache=True).past_key_values
            return model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        options: dict[str, Any] = {"use_cache": False, "skip_logits": True}
        if way == "packed":
            offsets = torch.empty(batch.sequences + 1, dtype=torch.int32, device=device)
            options["cu_seqlens"] = offsets
        return model(input_ids=ids, labels=ids, **options).loss

    with warnings.catch_warnings():
        # of fake tensors' addresses, which are only compared
        warnings.simplefilter("ignore", UserWarning)
        return {job.key: job for job in trace(call, "sm_90", way != "prompt", any_size=any_size)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.sample(which=lambda mixer, way: (mixer, way) == ("gla", "prompt"))
def test_later_steps_ask_for_no_other_variants(mixer: str, way: str) -> None:
    random = Random(zlib.crc32(f"{mixer} {way}".encode()))
    sizes: Any = {"vocab_size": 1024, "hidden_size": 512, "num_heads": 4, "mixers": [mixer] * 2}
    with torch.device("meta"):
        model: Any = SlipstreamForCausalLM(SlipstreamConfig(**sizes))
    model.to(torch.bfloat16).train(way != "prompt")
    shortest = SHORT + 1 if way == "prompt" and mixer in DIVIDED else 2
    first, *others = (random_batch(random, way, shortest) for _ in range(SIZES))
    known = variants(model, way, first, any_size=True)
    assert known
    for batch in others:
        found = variants(model, way, batch)
        new = {job.name: job.constants for key, job in found.items() if key not in known}
        assert not new, f"{mixer} {way}: {batch} compiles after {first}: {new}"

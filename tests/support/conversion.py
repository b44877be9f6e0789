"""A checkpoint to Slipstream and back: what every family is held to."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models import SlipstreamForCausalLM
from slipstream.models.convert import convert

SHARD = 20_000


def randomize(model: nn.Module) -> None:
    """All weights away from what they begin with, none of them 0 or 1."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


def assert_converts(theirs: Any, folder: Path, to: str, rtol: float = 1e-5) -> None:
    """Logits equal to 1e-5 of the largest, weights bit for bit after the way back, sharded."""
    theirs.save_pretrained(folder / "theirs", max_shard_size=f"{SHARD // 1000}KB")
    assert (folder / "theirs" / "model.safetensors.index.json").is_file()
    ids = torch.randint(theirs.config.vocab_size, (2, 70))
    want = logits(theirs, ids)

    done = convert(folder / "theirs", folder / "ours", shard_bytes=SHARD)
    assert (done.source, done.target) == (to, "slipstream")
    ours, info = SlipstreamForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert done.parameters == ours.num_parameters() + sum(x.numel() for x in ours.buffers())
    difference = (logits(ours, ids) - want).abs().max() / want.abs().max()
    assert difference < rtol, difference
    # and by the states of all layers
    with torch.no_grad():
        first = ours(ids[:, :40], use_cache=True)
        rest = ours(ids[:, 40:], cache=first.cache, use_cache=True).logits
    torch.testing.assert_close(rest, want[:, 40:], rtol=1e-4, atol=1e-4 * want.abs().max().item())

    convert(folder / "ours", folder / "again", to=to, shard_bytes=SHARD)
    again, info = type(theirs).from_pretrained(folder / "again", output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert torch.equal(logits(again, ids), want)

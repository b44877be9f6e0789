"""Mamba-3, fla's."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.layers.mamba3 import mimo_order
from slipstream.models.convert import families, fla, mamba2, rules


class Mamba3(mamba2.Mamba):
    name = model_type = kind = "mamba3"
    architecture = "Mamba3ForCausalLM"
    defaults: ClassVar = {
        **fla.COMMON, "head_dim": 64, "state_size": 128, "num_hidden_layers": 48, "norm_eps": 1e-5,
        "pad_token_id": 0, "expand": 2, "n_groups": 1, "use_bias": False, "rope_fraction": 0.5,
        "A_floor": 1e-4, "is_outproj_norm": False, "is_mimo": False, "mimo_rank": 4,
        "residual_in_fp32": True,
    }  # fmt: skip
    without_effect = (*mamba2.FlaMamba2.without_effect, "hidden_act", "num_heads")
    # options of the mixer, and fla's names of them
    names: ClassVar = {
        **{x: x for x in ("head_dim", "state_size", "n_groups", "A_floor", "norm_eps", "use_bias")},
        "rotary_fraction": "rope_fraction", "output_norm": "is_outproj_norm",
    }  # fmt: skip

    def mixer(self, config: families.ForeignConfig) -> dict[str, Any]:
        if config["is_mimo"] and config["mimo_rank"] < 2:
            raise ValueError(f"mimo_rank: want 2 or more, got {config['mimo_rank']}")
        return {"mimo_rank": config["mimo_rank"] if config["is_mimo"] else 1}

    def options(self, mixer: dict[str, Any]) -> dict[str, Any]:
        if mixer["rotary_fraction"] not in (0.5, 1.0):
            raise ValueError(f"rotary_fraction: fla has 0.5 or 1, got {mixer['rotary_fraction']}")
        return {"is_mimo": mixer["mimo_rank"] > 1, "mimo_rank": mixer["mimo_rank"]}

    def weights(self, m: Any) -> Iterable[rules.Rule]:
        N = m.state_size
        order = torch.arange(N, device="cpu") if m.mimo_rank == 1 else mimo_order(N)
        rows = _rows(m.sizes, order)
        yield rules.reordered("in_proj.weight", rows, 0)
        for name in ("B_bias", "C_bias"):
            yield rules.reordered(name, order, 2)
        for name in ("B_norm", "C_norm"):
            yield rules.reordered(name, order, 0)._replace(theirs=(f"{name}.weight",))
        yield from rules.renamed("out_proj.weight", "dt_bias", "D")
        if m.mimo_rank > 1:
            yield from rules.renamed("mimo_x", "mimo_z", "mimo_o")
        if m.in_proj.bias is not None:
            yield rules.reordered("in_proj.bias", rows, 0)
            yield from rules.renamed("out_proj.bias")
        if m.norm_weight is not None:
            shape = m.norm_weight.shape
            yield rules.shaped("norm_weight", "norm.weight", shape, (shape.numel(),))


def _rows(sizes: list[int], order: Tensor) -> Tensor:
    """The rows of in_proj, whose third and fourth blocks have these channels, of each rank and
    group."""
    rows = list(torch.arange(sum(sizes), device="cpu").split(sizes))
    rows[2:4] = [x.view(-1, len(order))[:, order].flatten() for x in rows[2:4]]
    return torch.cat(rows)

"""Saves a layer with torch.export and loads it again: python examples/exported_model.py

Operators of slipstream are operators of torch.library, so an exported graph calls them by name. The
process that loads the file has to import slipstream, which registers them; for a model of
slipstream.models that module, which also registers the types of what the model returns.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.layers import GatedDeltaNet
from slipstream.nn import RMSNorm, SwiGLU


class Block(nn.Module):
    """One layer of a model: mixer and MLP, each behind a norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.mixer = GatedDeltaNet(hidden_size=width, num_heads=2)
        self.mlp = SwiGLU(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


def main() -> float:
    """Returns how far the loaded graph is from the module."""
    torch.manual_seed(0)
    block = Block(32).eval()
    # the batch may have any size when the graph runs
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        block, (torch.randn(3, 40, 32),), dynamic_shapes=({0: batch},), strict=False
    )
    named = {str(x.target) for x in exported.graph.nodes if x.op == "call_function"}
    print("operators of slipstream:", *sorted(x for x in named if x.startswith("slipstream")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "block.pt2"
        torch.export.save(exported, path)
        loaded = torch.export.load(path).module()
    x = torch.randn(5, 40, 32)
    apart = (loaded(x) - block(x)).abs().max().item()
    print(f"module and loaded graph differ by {apart:.1e}")
    return apart


if __name__ == "__main__":
    main()

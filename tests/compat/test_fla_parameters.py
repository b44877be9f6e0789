"""fla's modules have the parameters of its own, by name and shape: its checkpoints load."""

from typing import Any

import pytest

from slipstream.compat.fla import modules

C = 12
WEIGHT = {"weight": (C,)}
# class, arguments, and what the state dict of fla-core 0.6.0's has
CASES: list[tuple[Any, tuple, dict[str, tuple[int, ...]]]] = [
    *[
        (getattr(modules, f"Fused{norm}{what}"), (C,), WEIGHT)
        for norm in ("LayerNorm", "RMSNorm")
        for what in ("Gated", "SwishGate", "SwishGateLinear")
    ],
    *[
        (getattr(modules, f"{norm}{what}"), (*groups, C), WEIGHT)
        for norm, *groups in (("LayerNorm",), ("RMSNorm",), ("GroupNorm", 3))
        for what in ("", "Linear")
    ],
    (modules.GroupNorm, (3, C, True, True), {**WEIGHT, "bias": (C,)}),
    (modules.GatedMLP, (C, None, 20),
        {"gate_proj.weight": (20, C), "up_proj.weight": (20, C), "down_proj.weight": (C, 20)}),
    (modules.ShortConvolution, (C, 4), {"weight": (C, 1, 4)}),
    (modules.ShortConvolution, (C, 4, True), {"weight": (C, 1, 4), "bias": (C,)}),
    (modules.RotaryEmbedding, (C,), {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "args", "names"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_modules_have_the_parameters_of_fla(
    kind: Any, args: tuple, names: dict[str, tuple[int, ...]]
) -> None:
    found = {name: tuple(x.shape) for name, x in kind(*args).state_dict().items()}
    assert found == names

"""fla's modules have the parameters of its own, by name and shape: its checkpoints load."""

from typing import Any

import pytest

from slipstream.compat.fla import modules
from slipstream.compat.fla.modules import feature_map, fused_bitlinear, long_conv

C, V = 12, 7  # channels, and those of an output
WEIGHT = {"weight": (C,)}
LINEAR = {"weight": (V, C), "norm.weight": (C,)}
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
    (
        modules.GatedMLP,
        (C, None, 20),
        {"gate_proj.weight": (20, C), "up_proj.weight": (20, C), "down_proj.weight": (C, 20)},
    ),
    (modules.ShortConvolution, (C, 4), {"weight": (C, 1, 4)}),
    (modules.ShortConvolution, (C, 4, True), {"weight": (C, 1, 4), "bias": (C,)}),
    (modules.RotaryEmbedding, (C,), {}),
    (fused_bitlinear.BitLinear, (C, V), LINEAR),
    (fused_bitlinear.BitLinear, (C, V, True), {**LINEAR, "bias": (V,)}),
    (fused_bitlinear.FusedBitLinear, (C, V), LINEAR),
    (long_conv.LongConvolution, (C, 20), {"filter": (C, 20)}),
    (
        long_conv.ImplicitLongConvolution,
        (C, 20),
        {"pos_emb.z": (1, 20, 3)}
        | {"mlp.0.weight": (16, 3), "mlp.0.bias": (16,)}
        | {"mlp.2.weight": (C, 16), "mlp.2.bias": (C,)},
    ),
    (
        feature_map.HadamardFeatureMap,
        (C,),
        {f"layer{i}.{x}": (C, C)[n:] for i in (1, 2) for n, x in enumerate(("weight", "bias"))},
    ),
    (feature_map.HedgehogFeatureMap, (C,), {"layer.weight": (C, C), "layer.bias": (C,)}),
    (feature_map.T2RFeatureMap, (C, V), {"layer.weight": (V, C)}),
    (feature_map.T2RFeatureMap, (C, V, True), {"layer.weight": (V, C), "layer.bias": (V,)}),
    (feature_map.RebasedFeatureMap, (C,), {"gamma": (C,), "beta": (C,)}),
    (feature_map.RebasedFeatureMap, (C, False), {"beta": (C,)}),
    (feature_map.TaylorFeatureMap, (C,), {}),
    (feature_map.DPFPFeatureMap, (C,), {}),
    (
        feature_map.LearnableOuterProductFeatureMap,
        (C, 5),
        {"layer1.weight": (5, C), "layer2.weight": (5, C)},
    ),
    (
        feature_map.LearnablePolySketchNonNegativeFeatureMap,
        (C, 5, 8),
        {"gamma": (C,), "beta": (C,)}
        | {f"sketches{i}.0.weight": (5, C) for i in (1, 2)}
        | {f"sketches{i}.1.weight": (5, 5) for i in (1, 2)},
    ),
]


@pytest.mark.parametrize(("kind", "args", "names"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_modules_have_the_parameters_of_fla(
    kind: Any, args: tuple, names: dict[str, tuple[int, ...]]
) -> None:
    found = {name: tuple(x.shape) for name, x in kind(*args).state_dict().items()}
    assert found == names

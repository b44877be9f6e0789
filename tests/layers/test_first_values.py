"""Runs of one seed begin alike: what parameters begin with changes only where first_values.json
does."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch

from slipstream import layers
from tests.support.small_layers import LAYERS, D, H
from tests.support.small_modules import MODULES

SNAPSHOT = Path(__file__).with_name("first_values.json")
WITH_PARAMETERS = [x for x in MODULES if any(True for _ in MODULES[x].make().parameters())]


def first_values(name: str) -> dict[str, list[float]]:
    """parameter -> its mean, and the mean of its squares, to four digits."""
    torch.manual_seed(0)
    if name in MODULES:
        module = MODULES[name].make()
    else:
        given = {"hidden_size": D, "num_heads": H, **LAYERS[name]}
        module = getattr(layers, name.split("-")[0])(**given)
    wide = {key: x.detach().double() for key, x in module.named_parameters()}
    return {
        key: [float(f"{y.mean().item():.4g}") for y in (x, x.square())] for key, x in wide.items()
    }


@pytest.mark.parametrize("name", [*WITH_PARAMETERS, *LAYERS])
def test_module_begins_with_its_first_values(name: str) -> None:
    want = json.loads(SNAPSHOT.read_text())[name]
    found = first_values(name)
    assert found.keys() == want.keys()
    for key, x in want.items():
        assert found[key] == pytest.approx(x, rel=1e-3, abs=1e-6), key


def write() -> None:
    """python -c "from tests.layers.test_first_values import write; write()" """
    names = (*WITH_PARAMETERS, *LAYERS)
    of_kind = groupby(names, lambda name: name.split("-")[0])  # a line each
    lines = (
        ", ".join(f'"{name}": {json.dumps(first_values(name))}' for name in group)
        for _, group in of_kind
    )
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")

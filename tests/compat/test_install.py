"""install() and uninstall(): imports of other packages' names find Slipstream's modules."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.compat import install, uninstall
from tests.support.scripts import ROOT


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No fla but that of `peer`, and nothing of it left behind."""
    monkeypatch.setattr(sys, "path", [x for x in sys.path if not (Path(x) / "fla").exists()])
    before, finders = dict(sys.modules), list(sys.meta_path)
    yield
    uninstall()
    assert sys.meta_path == finders
    assert [x for x in sys.modules if x.partition(".")[0] == "fla" and x not in before] == []


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named fla with two layers, one of which asks for an operator that is missing."""
    layers = tmp_path / "fla" / "layers"
    layers.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("real = True\n")
    (tmp_path / "fla" / "real_only.py").write_text("")
    init = "from .first import First, first\nfrom fla.layers.second import Second\n"
    (layers / "__init__.py").write_text(init)
    (layers / "first.py").write_text("import fla.ops\nclass First: pass\ndef first(): pass\n")
    (layers / "second.py").write_text("from fla.ops import chunk_cyfa\nclass Second: pass\n")
    (tmp_path / "fla" / "modules").mkdir()
    maps = "from fla.modules.layernorm import layer_norm\nfrom fla.utils import checkpoint\n"
    (tmp_path / "fla" / "modules" / "feature_map.py").write_text(maps)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_install_aliases_modules() -> None:
    with install("fla") as installed:
        fla = importlib.import_module("fla")
        ops = importlib.import_module("fla.ops")
        assert fla is importlib.import_module("slipstream.compat.fla")
        assert ops is importlib.import_module("slipstream.compat.fla.ops") and fla.ops is ops
        assert importlib.util.find_spec("fla.ops") is not None
        assert repr(installed) == "Installed('fla',)"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fla")
    assert ops.__spec__ is not None and ops.__spec__.name == "slipstream.compat.fla.ops"


def test_install_refuses_what_is_imported(peer: Path) -> None:
    real = importlib.import_module("fla")
    with pytest.raises(RuntimeError, match=r"fla is imported already, from .*__init__\.py"):
        install("fla")
    assert sys.modules.pop("fla") is real
    sys.modules.pop("fla.ops", None)


def test_install_refuses_unknown_packages() -> None:
    with pytest.raises(ValueError, match="packages: want some of causal_conv1d, fla"):
        install("fla", "torch")
    assert "fla" not in sys.modules


def test_missing_module_says_so(peer: Path) -> None:
    with install("fla"):
        # though the real package has it
        with pytest.raises(ModuleNotFoundError, match=r"Slipstream has no fla\.real_only; "):
            importlib.import_module("fla.real_only")
        with pytest.raises(ModuleNotFoundError, match=r"Slipstream has no fla\.ops\.x; "):
            importlib.import_module("fla.ops.x.y")


def test_layers_come_from_the_peers_files(peer: Path) -> None:
    with install("fla"):
        fla = importlib.import_module("fla")
        assert fla.First is sys.modules["fla.layers"].First and not hasattr(fla, "Third")
        with pytest.raises(ImportError, match=r"Slipstream has no fla\.ops\.chunk_cyfa"):
            fla.Second  # noqa: B018
        layers = importlib.import_module("fla.layers")
        assert layers.First.__module__ == "fla.layers.first"
        assert str(layers.__file__).startswith(str(peer))
        assert layers.__all__ == ["First", "first"]
        assert not hasattr(layers, "Third")
        with pytest.raises(ImportError, match=r"fla\.layers\.Second: Slipstream has no fla\.ops"):
            layers.Second  # noqa: B018
    ours = sys.modules["slipstream.compat.fla"]
    assert not hasattr(ours, "layers") and not hasattr(ours, "First")
    assert importlib.import_module("fla").real
    for name in [x for x in sys.modules if x.partition(".")[0] == "fla"]:
        del sys.modules[name]


def test_feature_maps_come_from_the_peers_file(peer: Path) -> None:
    with install("fla"):
        maps = importlib.import_module("fla.modules.feature_map")
        assert maps.__file__ == str(peer / "fla" / "modules" / "feature_map.py")
        assert maps.layer_norm.__module__ == "slipstream.compat.fla.modules.layernorm"
        with pytest.raises(ImportError, match=r"Slipstream has no fla\.modules\.LongConvolution"):
            exec("from fla.modules import LongConvolution")
    assert not hasattr(sys.modules["slipstream.compat.fla.modules"], "feature_map")


SCRIPT = """
import inspect
import torch
from slipstream.compat import install

install("fla")
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

torch.manual_seed(0)
config = Qwen3NextConfig(
    hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
)
layer, x = qwen.Qwen3NextGatedDeltaNet(config, 0), torch.randn(2, 30, 32)
used = inspect.getclosurevars(qwen.torch_chunk_gated_delta_rule).nonlocals["implementation"]
assert used.__module__ == "slipstream.compat.fla.ops.gated_delta_rule.chunk", used.__module__
got = layer(x)
qwen.torch_chunk_gated_delta_rule = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
torch.testing.assert_close(got, layer(x), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_transformers_finds_the_functions_of_fla() -> None:
    # a process of its own: in this one the module may be imported already
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]

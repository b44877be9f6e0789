"""examples/torchtitan: torchtitan's own trainer, on a CPU, FSDP2 x context parallelism."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import ROOT

WORDS = 200


@pytest.fixture
def assets(tmp_path: Path) -> list[str]:
    """Options that name a tokenizer and a text of its words."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["[UNK]", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends))
    data = tmp_path / "data"
    data.mkdir()
    rows = [" ".join(f"w{(7 * i + j * j) % WORDS}" for j in range(50)) for i in range(60)]
    lines = [json.dumps({"text": x}) for x in rows]
    (data / "data.jsonl").write_text("\n".join(lines))
    given = {
        "--hf_assets_path": tmp_path,
        "--dataloader.dataset": "c4_test",
        "--dataloader.dataset_path": data,
    }
    return [str(x) for pair in given.items() for x in pair]


def run(folder: Path, ranks: int, context: int, *options: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "tests.support.torchtitan_on_a_cpu"]
    config = {
        "module": "hybrid",
        "config": "hybrid_debug",
        "dump_folder": str(folder),
        "training.seq_len": "64",
        "training.steps": "3",
        "training.mixed_precision_param": "float32",
        "parallelism.context_parallel_degree": str(context),
        "metrics.log_freq": "1",
        "lr_scheduler.warmup_steps": "1",
        "checkpoint.interval": "1000",
    }
    command += [x for name, value in config.items() for x in (f"--{name}", value)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/torchtitan"), *sys.path])
    here = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [*command, "--checkpoint.enable", *options],
        cwd=ROOT,
        env={**os.environ, **here, "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    steps = re.findall(r"^step \d+ loss (\S+) norm (\S+)$", found.stdout, re.M)
    return [(float(loss), float(norm)) for loss, norm in steps]


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path, assets: list[str]) -> None:
    """Each row cut in two and the weights in shards, from the same first weights."""
    pytest.importorskip("torchtitan.protocols.model_spec", reason="torchtitan 0.3.0 is not here")
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        if not found:
            assert run(folder, 1, 1, *assets, "--checkpoint.create_seed_checkpoint") == []
        else:
            first = tmp_path / "1/checkpoint/step-0"
            (folder / "checkpoint").mkdir(parents=True)
            first.rename(folder / "checkpoint/step-0")
        # one rank keeps some operations of a block, two keep none
        mode = "selective" if ranks == 1 else "full"
        found.append(run(folder, ranks, ranks, *assets, f"activation_checkpoint:{mode}"))
    assert len(found[0]) == 3
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-5)


def test_options_are_declared_as_torchtitans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By keyword, and no other: each module that is replaced has options of its own. Stand-ins, as
    torchtitan is not installed here."""

    class Theirs:
        @dataclass(kw_only=True, slots=True)
        class Config:
            width: int = 0

    names = (
        "config.override",
        "models.common.attention",
        "models.qwen3_5.model",
        "protocols.module",
    )
    for name in ("fla", "spmd_types", *(f"torchtitan.{x}" for x in names)):
        found: Any = ModuleType(name)
        found.__spec__ = ModuleSpec(name, None)
        found.__getattr__ = lambda name: getattr(object, name) if name[0] == "_" else Theirs
        found.override = lambda **_: lambda function: function
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr("slipstream.integrations.usage._sites", {})
    made = runpy.run_module("slipstream.integrations.torchtitan").values()
    own = [x for x in made if isinstance(x, type) and issubclass(x, Theirs)]
    assert len(own) == 5
    for options in (x.Config for x in own):
        assert options(width=3).width == 3
        with pytest.raises(TypeError, match="positional"):
            options(3)
        with pytest.raises(AttributeError):
            options().breadth = 3

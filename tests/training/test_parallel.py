"""Runs of two processes whose model is sharded, or whose rows are cut, beside one process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from slipstream.training.config import Parallel, from_dict
from slipstream.training.parallel import expect_processes
from slipstream.training.ranks import Interrupt
from slipstream.training.run import train
from slipstream.training.sample import load
from tests.support import wants
from tests.support.processes import in_processes, run_ranks
from tests.support.slow_ranks import save_slowly
from tests.support.training_configs import config_of

pytestmark = wants.collectives
STEPS = 6

RUN = {
    "model": {"hidden_size": 32, "num_heads": 2, "mixers": ["gated_deltanet", "attention"]},
    "data": {
        "files": ["{stdlib}/json", "{stdlib}/email"],
        "held_out": 0.15,
        "row_tokens": 33,
        "eval_rows": 2,
    },
    "training": {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 64,
        "save_steps": 3,
        "eval_steps": 3,
        "save_total_limit": 5,
    },
}


def raw(out: Path, **sections: dict) -> dict[str, Any]:
    return config_of(out, RUN, sections)


def started(config: dict[str, Any], folder: Path) -> subprocess.Popen:
    """Two ranks of slipstream train."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    return subprocess.Popen(
        [*run, "-m", "slipstream", "train", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    )  # fmt: skip


def finish(config: dict[str, Any], folder: Path) -> str:
    process = started(config, folder)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def finish_forked(config: dict[str, Any], folder: Path) -> str:
    """As finish, without torchrun, and with imports done."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return run_ranks(["train", path])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same(got: Path, want: Path) -> None:
    torch.testing.assert_close(weights(got), weights(want), rtol=1e-4, atol=1e-5)


def alone(out: Path, **sections: dict) -> Path:
    result = train(from_dict(raw(out, **sections)), Interrupt(), Console(quiet=True))
    assert result.step == STEPS
    return out


def test_dimensions_are_those_of_the_processes() -> None:
    assert expect_processes(Parallel(), 4) == Parallel(4)
    assert expect_processes(Parallel(shard=2), 4) == Parallel(2, 2)
    with pytest.raises(ValueError, match="--nproc-per-node 2"):
        expect_processes(Parallel(context=2), 1)
    with pytest.raises(ValueError, match="are 3 processes, and 2 were started"):
        expect_processes(Parallel(3), 2)
    assert expect_processes(Parallel(tensor=2), 4) == Parallel(2, 1, 1, 2)
    with pytest.raises(ValueError, match="x tensor 2 are 2 processes, and 3 were started"):
        expect_processes(Parallel(tensor=2), 3)
    with pytest.raises(ValueError, match=r"parallel\.shard: want at least 1, got 0"):
        Parallel(shard=0)
    with pytest.raises(ValueError, match=r"did you mean parallel\.context"):
        from_dict(raw(Path(), parallel={"contxt": 2}))


def test_saved_files_are_there_for_all_ranks(tmp_path: Path) -> None:
    """The first writes that a checkpoint is whole once each rank has written its part; none leaves
    before all have come to their end."""
    found = in_processes(2, tmp_path, save_slowly, tmp_path)
    first, ends, random = sorted(found)
    assert first == ["config of 0", "model of 0", ("schedule of", 0)]
    assert ends == ["end of 0", "end of 1"] and random == ["random of 0", "random of 1"]


@pytest.mark.parametrize("kind", ["context", pytest.param("tensor", marks=pytest.mark.slow)])
def test_parts_train_like_the_whole(kind: str, tmp_path: Path) -> None:
    """Rows cut, or heads sharded: packed documents, an odd number of tokens. Exported weights are
    plain ones."""
    data = {"packing": "reset"}
    want = alone(tmp_path / "one", data=data)
    config = raw(tmp_path / "two", data=data, parallel={kind: 2})
    text = finish_forked(config, tmp_path)
    assert text.count("on all held-out text") == 1
    assert "[rank1]" not in text  # of torch's own warnings
    assert_same(tmp_path / "two", want)
    model, _ = load(tmp_path / "two")
    assert type(model).__name__ == "SlipstreamForCausalLM"
    if kind == "tensor":
        for name in ("result.json", "model.safetensors"):
            (tmp_path / "two" / name).unlink()
        with pytest.raises(AssertionError, match="Missing key in checkpoint"):
            finish(raw(tmp_path / "two", data=data, parallel={"shard": 2}), tmp_path)


@pytest.mark.slow
def test_sharded_run_goes_on_as_another(tmp_path: Path) -> None:
    """From the checkpoint of shards, with the rows cut, to the end of one process's run."""
    want = alone(tmp_path / "one", training={"per_device_train_batch_size": 4})
    finish(raw(tmp_path / "two", parallel={"shard": 2}), tmp_path)
    assert_same(tmp_path / "two", want)
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "two" / name).unlink()
    (tmp_path / "two/checkpoint-6/trainer_state.json").unlink()
    again = raw(tmp_path / "two", parallel={"context": 2})
    again["training"]["per_device_train_batch_size"] = 4
    text = finish(again, tmp_path)
    assert "continuing at" in text and "checkpoint-3" in text
    assert_same(tmp_path / "two", want)


def pid_of_rank(text: str, process: subprocess.Popen, rank: int) -> int:
    """Found among the children of torchrun's process, by their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == process.pid:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"no rank {rank} under {process.pid}: {text}")


def signalled(config: dict[str, Any], folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Sends it to rank 1 after the first step, and waits for all to end."""
    text, sent = "", 0.0
    with started(config, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            if not sent and re.match(r" +1 ", line):
                os.kill(pid_of_rank(text, process, 1), number)
                sent = time.monotonic()
    assert sent and time.monotonic() - sent < 60, text
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("parallel", [{}, {"shard": 2}], ids=["data", "shard"])
def test_one_rank_stops_all(parallel: dict, tmp_path: Path) -> None:
    config = raw(tmp_path / "run", parallel=parallel, training={"max_steps": 5000})
    status, text = signalled(config, tmp_path, signal.SIGTERM)
    assert status == 0, text
    assert text.count("nothing lost") == 1
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert 0 < int(checkpoint.name.rpartition("-")[2]) < 5000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_dead_rank_ends_the_others(tmp_path: Path) -> None:
    config = raw(tmp_path / "run", parallel={"shard": 2}, training={"max_steps": 5000})
    status, text = signalled(config, tmp_path, signal.SIGKILL)
    assert status != 0, text

"""slipstream doctor, explain and precompile, as a user runs them on a machine without a GPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.cli.samples import SAMPLES
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED

needs_compiler = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)


@pytest.fixture(autouse=True)
def _same_ptxas_afterwards() -> Iterator[None]:
    """explain selects one for the process, which may not know other tests' architectures."""
    with mock.patch.dict(os.environ):
        yield


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


def test_every_public_operator_has_a_sample() -> None:
    """But for tables of positions, and for decoding steps, which are called by name."""
    import inspect

    from slipstream import ops

    public = {name for name, fn in vars(ops).items() if inspect.isfunction(fn)}
    without = {x for x in public if "step" in x or "update" in x or "position" in x}
    # attention and the short convolution under other names
    without |= {x for x in public if x.startswith(("flash_attn_", "causal_conv1d"))}
    without |= {"rotary_embedding", "rotary_tables"}
    assert {x.op for x in SAMPLES} <= public
    assert public - without - {x.op for x in SAMPLES} == set()


def test_doctor_agrees_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    names = ("retention", "delta_rule", "rms_norm", "linear_kl_div")
    status, text = invoke("doctor", *names, "--no-interpreted")
    assert status == 0 and "all agree" in text
    assert all(x in text for x in (*names, "chunk_delta_rule", str(tmp_path)))
    status, text = invoke("doctor", "hgrn", "--no-interpreted", "--json")
    report = json.loads(text)
    assert status == 0 and {x["operator"] for x in report["checks"]} >= {"chunk_hgrn"}
    assert all(0 < x["output"] < 1e-4 for x in report["checks"])


def test_doctor_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import ops

    right = ops.chunk_retention

    def wrong(*args: object, **options: object) -> object:
        o, state = right(*args, **options)  # pyright: ignore
        return (o if options.get("impl") == "reference" else o * 1.01), state

    wrong.__signature__ = __import__("inspect").signature(right)  # pyright: ignore
    monkeypatch.setattr(ops, "chunk_retention", wrong)
    status, text = invoke("doctor", "chunk_retention", "--no-interpreted")
    assert status == 1 and "FAIL chunk_retention" in text and "worst: output 0" in text


def test_doctor_names_what_it_does_not_know() -> None:
    status, text = invoke("doctor", "retentoin")
    assert status == 2 and "got 'retentoin'" in text


@needs_compiler
def test_explain_names_kernels_tiles_and_reasons() -> None:
    status, text = invoke("explain", "chunk_simple_gla", "--arch", "sm_80", "--shape", "K=64,V=64")
    assert status == 0
    assert "linear_walk_kernel [" in text and "warps=" in text and "166912 bytes" in text
    status, text = invoke("explain", "chunk_simple_gla", "--shape", "K=512")
    assert status == 0 and "at most 256" in text
    status, text = invoke("explain", "chunk_simple_gla", "--arch", "sm_91")
    assert status == 2 and "arch: want one of" in text


@needs_compiler
@pytest.mark.parametrize("operator", ["chunk_simple_gla", "attention", "rms_norm"])
def test_explain_says_what_was_learnt_here(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was demoted, or that a known fault stops, is rejected for that reason."""
    import torch

    from slipstream.core import machine, toolchain

    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "select_ptxas", lambda *args: None)
    width = 64
    kinds = {
        "chunk_simple_gla": ("linear.triton", "none", "scalar", torch.bfloat16, width, width),
        "attention": ("softmax.triton", torch.bfloat16, width, width, "right"),
        "rms_norm": ("norm.triton", torch.bfloat16, 2 * width, torch.bfloat16),
    }
    shape = f"K={width},V={width}"
    machine.elsewhere("sm_80").demote(kinds[operator], "killed by SIGABRT")
    status, text = invoke("explain", operator, "--arch", "sm_80", "--shape", shape)
    assert status == 0 and "chosen: eager" in text
    assert "rejected: triton, killed by SIGABRT" in text
    monkeypatch.setattr(toolchain, "ptxas_version", lambda path: "13.0.88")
    status, text = invoke("explain", operator, "--arch", "sm_70", "--shape", shape)
    assert status == 0 and "rejected: triton, any kernel: ptxas 13 has no sm_70" in text


@needs_compiler
def test_precompile_fills_a_cache_that_says_by_what(tmp_path: Path) -> None:
    run = ["precompile", "chunk_retention", "--arch", "sm_80", "--head-dim", "32", "--forward"]
    run += ["--no-packed", "--no-state", "--no-grouped", "--jobs", "1", "--cache", str(tmp_path)]
    status, text = invoke(*run)
    assert status == 0, text
    assert list(tmp_path.glob("*/linear_walk_kernel.cubin"))
    from slipstream.cli.filling import stale

    assert stale(tmp_path, "sm_80") is None
    assert "arch sm_80 there, sm_90 here" in str(stale(tmp_path, "sm_90"))

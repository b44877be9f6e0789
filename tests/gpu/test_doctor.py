"""slipstream doctor on a device: every implementation of each kind of kernel agrees."""

import json
import subprocess
import sys

import pytest
import torch

from slipstream.tools.catalog import QUICK_OPERATORS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_doctor_agrees_on_the_device() -> None:
    run = [sys.executable, "-c", "from slipstream.cli import main; main()"]
    done = subprocess.run(
        [*run, "doctor", "--quick", "--json"], capture_output=True, text=True, timeout=550
    )
    report = json.loads(done.stdout)
    bad = [x for x in report["checks"] if not x["ok"]]
    assert done.returncode == 0 and not bad, (bad, done.stderr[-2000:])
    major, minor = torch.cuda.get_device_capability()
    assert report["device"]["arch"] == f"sm_{major}{minor}" and report["device"]["driver"]
    assert report["ptxas"]["version"] and report["triton"] and report["cuda"]
    assert {x["operator"].split("-")[0] for x in report["checks"]} == set(QUICK_OPERATORS)
    kernels = {
        x["operator"].split("-")[0] for x in report["checks"] if x["impl"] in ("triton", "sm90")
    }
    assert kernels >= {"chunk_simple_gla", "chunk_gated_delta_rule", "attention"}

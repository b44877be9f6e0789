"""causal_conv1d, flash_attn and mamba_ssm under slipstream.compat have the peers' arguments.

other_signatures.json: those of causal_conv1d 1.7.0, flash_attn 2.8.4 with the module of
FlashAttention-3,
and mamba_ssm 2.3.2.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

SNAPSHOT = json.loads((Path(__file__).parent / "other_signatures.json").read_text())
# helpers of their kernels, and what the pages under docs/guides say is missing
MISSING = {
    "flash_attn.flash_attn_interface": ("maybe_contiguous", "round_multiple"),
    "flash_attn.layers.rotary": ("rotate_half",),
    "flash_attn.ops.triton.layer_norm": (
        "layer_norm_ref", "maybe_contiguous", "maybe_contiguous_lastdim", "rms_norm_ref",
        "triton_autotune_configs",
    ),
    "flash_attn_interface": (
        "get_scheduler_metadata", "maybe_contiguous", "round_multiple",
        "round_up_headdim", "setup_context",
    ),
    "mamba_ssm.ops.selective_scan_interface": ("rms_norm_forward",),
    "mamba_ssm.ops.triton.ssd_combined": (
        "ensure_stride", "init_to_zero", "mamba_conv1d_scan_ref", "mamba_split_conv1d_scan_ref",
        "selective_scan_bwd", "ssd_chunk_scan_combined_ref",
    ),
    "mamba_ssm.ops.triton.layernorm_gated": ("rms_norm_ref",),
    "mamba_ssm.ops.triton.layer_norm": ("config_prune", "layer_norm_ref", "rms_norm_ref"),
}  # fmt: skip
NAMES = [
    (module, name) for module, functions in SNAPSHOT.items() for name in functions
    if name.partition(".")[0] not in MISSING.get(module, ())
]  # fmt: skip


def member(module: str, name: str) -> Any:
    found = importlib.import_module(f"slipstream.compat.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters(text: str) -> dict[str, Any]:
    """Names and defaults, in order."""
    scope: dict[str, Any] = {}
    exec(f"def f({text}): ...", {"torch": None}, scope)
    return {p.name: p.default for p in inspect.signature(scope["f"]).parameters.values()}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(x) for x in NAMES])
def test_has_the_peers_arguments(module: str, name: str) -> None:
    """In their order; those of ours alone come after them, by name only."""
    want = parameters(SNAPSHOT[module][name])
    ours = list(inspect.signature(member(module, name)).parameters.values())
    got = {p.name: p.default for p in ours if p.kind is not p.KEYWORD_ONLY}
    # not needed here, so that they may be left out
    optional = {x: None for x in got if x.startswith("max_seqlen") and want.get(x) is not None}
    assert list(got) == list(want)
    assert got == want | optional


@pytest.mark.parametrize("module", SNAPSHOT)
def test_missing_names_say_so(module: str) -> None:
    found = importlib.import_module(f"slipstream.compat.{module}")
    for name in MISSING.get(module, ()):
        with pytest.raises((ImportError, AttributeError), match=name):
            getattr(found, name)

"""The parts of docs/guides/migrate_fla.md that are tables of slipstream.compat.fla.

    python tools/fla_page.py            writes them
    python tools/fla_page.py --check    exit status 1 if they are others

They stand between the lines "<!-- from compat.fla: NAME -->" and "<!-- end of it -->".
"""

import re
import sys
from collections.abc import Iterable

from own_checkout import ROOT
from tables import grid
from tables import written as with_parts

import slipstream.compat.fla as compat
from slipstream.compat.fla.adaptor import HINTS, REFUSED
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.paths import FUNCTIONS, MISSING
from slipstream.models import MIXERS

NAME = compat.__name__
PAGE = ROOT / "docs/guides/migrate_fla.md"
PART = re.compile(r"(<!-- from compat\.fla: (\w+) -->\n)(.*?)(<!-- end of it -->)", re.DOTALL)
# in our modules, but not in fla's
OURS = ("Norm", "linear")
# slipstream.nn's class of the purpose, by fla's
NN = {
    "FusedCrossEntropyLoss": "CrossEntropyLoss", "FusedKLDivLoss": "LinearKLDivLoss",
    "FusedLinearCrossEntropyLoss": "LinearCrossEntropyLoss", "FusedRMSNormGated": "GatedRMSNorm",
    "GatedMLP": "SwiGLU", "RMSNormGated": "GatedRMSNorm",
    **{x: x for x in ("GroupNorm", "L2Norm", "LayerNorm", "RMSNorm", "RotaryEmbedding",
                      "ShortConvolution")},
}  # fmt: skip
# fla's layer of each mixer of a config
LAYERS = {
    "comba": "Comba", "delta_net": "DeltaNet", "forgetting_attn": "ForgettingAttention",
    "gated_deltanet": "GatedDeltaNet", "gated_deltaproduct": "GatedDeltaProduct",
    "gdn2": "GatedDeltaNet2", "gla": "GatedLinearAttention", "gsa": "GatedSlotAttention",
    "hgrn": "HGRNAttention", "hgrn2": "HGRN2Attention", "kda": "KimiDeltaAttention",
    "mamba2": "Mamba2", "mamba3": "Mamba3",
    "retention": "MultiScaleRetention", "rwkv6": "RWKV6Attention", "rwkv7": "RWKV7Attention",
}  # fmt: skip


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def operators() -> list[str]:
    rows = []
    for row in sorted(OPERATORS, key=lambda row: (row.path, row.name)):
        ours = f"`{row.function.__name__}`"
        notes = filter(None, [row.note, *(f"`{a}` is `{b}`" for a, b in row.renamed.items())])
        rows.append([f"`fla.{row.path}.{row.name}`", ours, "; ".join(notes)])
    return grid(("fla", "Slipstream", "difference"), rows)


def functions() -> list[str]:
    """Functions that are no operators: of fla.ops and of fla.ops.utils."""
    names = {path: [f.__name__] for path, f in sorted(FUNCTIONS.items())}
    prefix = f"{NAME}.ops.utils."
    for name in sorted(x for x in sys.modules if x.startswith(prefix)):
        names[f"ops.utils.{name.removeprefix(prefix)}"] = public(name)
    return grid(("fla", "names"), [(f"`fla.{x}`", code(y)) for x, y in names.items() if y])


def public(name: str) -> list[str]:
    """Functions and classes that a module defines."""
    return sorted(
        member
        for member, value in vars(sys.modules[name]).items()
        if getattr(value, "__module__", "") == name and not member.startswith("_")
    )


def modules() -> list[str]:
    prefix = f"{NAME}.modules."
    names = {x for x in sys.modules if x.startswith(prefix)}
    rows = []
    for name in sorted(x for x in names if sys.modules[x].__name__ == x and public(x)):
        members = [x for x in public(name) if x not in OURS]
        ours = sorted({f"slipstream.nn.{NN[x]}" for x in members if x in NN})
        rows.append([f"`fla.modules.{name.removeprefix(prefix)}`", code(members), code(ours)])
    return grid(("fla", "names", "in new code"), rows)


def layers() -> list[str]:
    rows = [(f"`{theirs}`", f"`{MIXERS[mixer]}`", f"`{mixer}`") for mixer, theirs in LAYERS.items()]
    return grid(("fla.layers", "slipstream.layers", "mixer of a config"), rows)


def differences() -> list[str]:
    refused = (f"`{n}`" + (" (other than `None`)" if v is None else "") for n, v in REFUSED.items())
    return [
        f"- **Accepted without effect**: {code(sorted(HINTS))}. The result is the same.",
        "- **Refused by name** (`NotImplementedError`), unless their value asks for nothing:",
        f"  {', '.join(refused)}; and `head_first=True`: tensors are `[B, T, H, K]`.",
    ]


def missing() -> list[str]:
    return [f"- `fla.{path}`: {code(names)}" for path, names in sorted(MISSING.items())]


PARTS = (layers, differences, operators, functions, modules, missing)


def written(text: str) -> str:
    """The page with its parts as they should be."""
    return with_parts(text, {x.__name__: "\n".join(x()) for x in PARTS}, PART)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(written(text), "utf-8")
    elif written(text) != text:
        sys.exit(f"{PAGE}: run python tools/fla_page.py")

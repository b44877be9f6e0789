"""The parts of docs/guides/migrate_fla.md that are tables of slipstream.compat.fla.

    python tools/fla_page.py            writes them
    python tools/fla_page.py --check    exit status 1 if they are others

They stand between the lines "<!-- from compat.fla: NAME -->" and "<!-- end of it -->".
"""

import re
import sys
from collections.abc import Iterator

from own_checkout import ROOT

import slipstream.compat.fla as compat
import slipstream.ops
from slipstream.compat.fla.adaptor import HINTS, REFUSED
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.paths import FUNCTIONS, MISSING, PARALLEL
from slipstream.models import MIXERS

NAME = compat.__name__
PAGE = ROOT / "docs/guides/migrate_fla.md"
PART = re.compile(r"(<!-- from compat\.fla: (\w+) -->\n)(.*?)(<!-- end of it -->)", re.DOTALL)
# in our modules, but not in fla's
OURS = ("Norm", "linear")
# slipstream.nn's class of the purpose, by fla's
NN = {
    "FusedCrossEntropyLoss": "CrossEntropyLoss",
    "FusedKLDivLoss": "LinearKLDivLoss",
    "FusedLinearCrossEntropyLoss": "LinearCrossEntropyLoss",
    "FusedRMSNormGated": "GatedRMSNorm",
    "GatedMLP": "SwiGLU",
    "GroupNorm": "GroupNorm",
    "L2Norm": "L2Norm",
    "LayerNorm": "LayerNorm",
    "RMSNorm": "RMSNorm",
    "RMSNormGated": "GatedRMSNorm",
    "RotaryEmbedding": "RotaryEmbedding",
    "ShortConvolution": "ShortConvolution",
}

# fla's layer of each mixer of a config
LAYERS = {
    "comba": "Comba",
    "delta_net": "DeltaNet",
    "forgetting_attn": "ForgettingAttention",
    "gated_deltanet": "GatedDeltaNet",
    "gated_deltaproduct": "GatedDeltaProduct",
    "gdn2": "GatedDeltaNet2",
    "gla": "GatedLinearAttention",
    "gsa": "GatedSlotAttention",
    "hgrn": "HGRNAttention",
    "hgrn2": "HGRN2Attention",
    "kda": "KimiDeltaAttention",
    "lightnet": "LightNetAttention",
    "mamba2": "Mamba2",
    "mamba3": "Mamba3",
    "precond_gated_deltanet": "PrecondGatedDeltaNet",
    "precond_kda": "PrecondKDA",
    "retention": "MultiScaleRetention",
    "rwkv6": "RWKV6Attention",
    "rwkv7": "RWKV7Attention",
}


def code(names: Iterator[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def head(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def operators() -> Iterator[str]:
    yield from head("fla", "Slipstream", "difference")
    for row in sorted(OPERATORS, key=lambda row: (row.path, row.name)):
        ours = f"`{row.function.__name__}`"
        if not hasattr(slipstream.ops, row.function.__name__):
            ours = "`fused_recurrent_rwkv7` with a = -kk, b = kk a"
        notes = [row.note, *(f"`{a}` is `{b}`" for a, b in row.renamed.items())]
        yield f"| `fla.{row.path}.{row.name}` | {ours} | {'; '.join(filter(None, notes))} |"


def functions() -> Iterator[str]:
    """Functions that are no operators: of fla.ops and of fla.ops.utils."""
    yield from head("fla", "names")
    for path, members in sorted(FUNCTIONS.items()):
        yield f"| `fla.{path}` | {code(f.__name__ for f in members)} |"
    prefix = f"{NAME}.ops.utils."
    for name in sorted(x for x in sys.modules if x.startswith(prefix)):
        members = public(name)
        if members:
            yield f"| `fla.ops.utils.{name.removeprefix(prefix)}` | {code(iter(members))} |"


def public(name: str) -> list[str]:
    """Functions and classes that a module defines."""
    return sorted(
        member
        for member, value in vars(sys.modules[name]).items()
        if getattr(value, "__module__", "") == name and not member.startswith("_")
    )


def modules() -> Iterator[str]:
    yield from head("fla", "names", "in new code")
    prefix = f"{NAME}.modules."
    names = {x for x in sys.modules if x.startswith(prefix)}
    real = sorted(x for x in names if sys.modules[x].__name__ == x and public(x))
    for name in real:
        members = [x for x in public(name) if x not in OURS]
        ours = sorted({f"slipstream.nn.{NN[x]}" for x in members if x in NN})
        path = f"fla.modules.{name.removeprefix(prefix)}"
        yield f"| `{path}` | {code(iter(members))} | {code(iter(ours))} |"


def layers() -> Iterator[str]:
    yield from head("fla.layers", "slipstream.layers", "mixer of a config")
    for mixer, theirs in LAYERS.items():
        yield f"| `{theirs}` | `{MIXERS[mixer]}` | `{mixer}` |"


def differences() -> Iterator[str]:
    refused = (f"`{n}`" + (" (other than `None`)" if v is None else "") for n, v in REFUSED.items())
    yield f"- **Accepted without effect**: {code(iter(sorted(HINTS)))}. The result is the same."
    yield "- **Refused by name** (`NotImplementedError`), unless their value asks for nothing:"
    yield f"  {', '.join(refused)}; and `head_first=True`: tensors are `[B, T, H, K]`."


def missing() -> Iterator[str]:
    yield from (f"- `fla.{path}`: {code(iter(names))}" for path, names in sorted(MISSING.items()))


def styles() -> Iterator[str]:
    yield ", ".join(f"`fla.{path}.{name}`" for path, name in PARALLEL.items() if "." in path) + "."


PARTS = (layers, differences, operators, functions, styles, modules, missing)


def written(text: str) -> str:
    """The page with its parts as they should be."""
    made = {x.__name__: "\n".join(x()) for x in PARTS}
    return PART.sub(lambda x: f"{x[1]}{made[x[2]]}\n{x[4]}", text)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(written(text), "utf-8")
    elif written(text) != text:
        sys.exit(f"{PAGE}: run python tools/fla_page.py")

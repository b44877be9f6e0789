"""The page docs/guides/migrate_fla.md, from the tables of slipstream.compat.fla.

    python tools/fla_page.py > docs/guides/migrate_fla.md

tests/compat/test_fla_page.py compares it with that file.
"""

import sys
import textwrap
from collections.abc import Iterator

import own_checkout  # noqa: F401

import slipstream.compat.fla as compat
import slipstream.ops
from slipstream.compat.fla.adaptor import HINTS, REFUSED
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.paths import FUNCTIONS, MISSING, PARALLEL
from slipstream.models import MIXERS

ROOT = compat.__name__
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

HEAD = """# From flash-linear-attention (fla)

`slipstream.compat.fla` has fla's modules, names, positional order, defaults and keywords, those of
fla-core {version}, on Slipstream's operators. It runs on a CPU too. Use it in one of two ways.

**Change the import.** Nothing is installed:

```python
import torch
from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
g, beta = -torch.rand(1, 64, 2), torch.rand(1, 64, 2)
o, state = chunk_gated_delta_rule(q, k, v, g, beta, None, None, True)
```

**Leave the code as it is.** `install("fla")` makes imports of `fla` find these modules, until
`uninstall("fla")` or the end of a `with` block. Call it before anything imports fla: if the real
package is imported already, it raises `RuntimeError`.

```python
import slipstream.compat

with slipstream.compat.install("fla"):
    from fla.modules import RMSNorm
    from fla.ops import chunk_gla

g = -torch.rand(1, 64, 2, 16)
o, _ = chunk_gla(RMSNorm(16)(q), k, v, g, 0.25)
```

New code is better off with [slipstream.ops](../api/ops) and [slipstream.nn](../api/nn) themselves:
options are given by name there, and more of them exist (`reverse`, `state_v_first`, `impl` nearly
everywhere).

## fla's own layers and models

`fla.layers` and `fla.models` are loaded from fla's own files, which have to be there. The files
alone are enough: fla's operators, and with them Triton and a GPU, are not needed.

```bash
pip install --no-deps flash-linear-attention=={version} einops
```

`import fla` then imports them, as fla itself does, so that they register with transformers' Auto
classes. These models train, decode with a cache, generate and take left padding on a CPU:
{models}
BitNet, MLA, Samba and Transformer want `flash_attn`, and Mamba and Mamba-2 look for `mamba_ssm` and
`causal_conv1d`: `install("fla", "flash_attn", "mamba_ssm", "causal_conv1d")` serves all of them.
MoM runs too; its outputs depend on later tokens, as they do in fla. Layers and models whose
operators Slipstream does not have raise an `ImportError` that names them, and do not keep the
others from being imported.

Since transformers 5.24 `generate` passes `cache=`, which models of fla 0.6.0 pass over, also
with fla's own kernels: each new token then sees nothing before it. Imported through
`install("fla")` they are given it as `past_key_values`. Without a mask the Forgetting
Transformer's `generate` is an error of its attention; give it `attention_mask`.

## Layers of Slipstream's own

| fla.layers | slipstream.layers | mixer of a config |
|---|---|---|
{layers}

Parameters have other names, and projections of one input are one matrix. With fla's weights in
place the results are the same: of `KimiDeltaAttention`, `PrecondKDA` and `GatedDeltaNet2` with
`gate_bias=True`, of `MultiScaleRetention` with `norm_affine=True`. Comba's are not: fla normalises
p. [slipstream convert](convert.md) moves a model's weights.

## What is different

- **Accepted without effect**: {hints}. Slipstream has no use for them, and the result is the same.
- **Refused by name** (`NotImplementedError`), unless their value asks for nothing: {refused}; and
  `head_first=True`: tensors are `[B, T, H, K]`.
- `cp_context` is taken where fla takes it. `fla.ops.cp.build_cp_context` makes it, with a
  [plan](context-parallel.md) inside; the layout is contiguous alone. Unlike fla's operators, these
  take states beside it: those of all sequences, on every rank.
- `transpose_state_layout` is `state_v_first`, with a `DeprecationWarning`.
- A keyword that neither fla nor Slipstream knows is a `TypeError`. fla's functions that take
  `**kwargs` ignore it.
- `fused_recurrent_*` have gradients, all of them. Initial states may have any floating dtype.
- q, k and v of different dtypes are cast to the widest; the result has v's dtype.
- A mean of losses over no target at all is 0; fla's is NaN.
- `ShortConvolution(mask=)` does not write to its input.
- With fewer tokens than `max_len`, `LongConvolution` uses the first taps of its filter. In fla the
  other taps wrap around, so that the first results depend on the last inputs.
- `BitLinear` adds its bias, as `FusedBitLinear` does.
- `tensor_cache` does not cache: by identity, results would be those of a tensor before it was
  written to.
- Checkpoints fit: parameters have fla's names and shapes.

## Operators

| fla | Slipstream | difference |
|---|---|---|
"""
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
MODELS = (
    "BitNet, Comba, DeltaNet, Forgetting Transformer, GLA, GSA, Gated DeltaNet, Gated DeltaProduct,"
    " HGRN, HGRN-2, KDA, LightNet, linear attention, MLA, Mamba, Mamba-2, Precond Gated DeltaNet,"
    " Precond KDA, RWKV-6, RWKV-7, Raven, RetNet, Samba, Transformer and YOCO."
)


def code(names: Iterator[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def operators() -> Iterator[str]:
    for row in sorted(OPERATORS, key=lambda row: (row.path, row.name)):
        ours = f"`{row.function.__name__}`"
        if not hasattr(slipstream.ops, row.function.__name__):
            ours = "`fused_recurrent_rwkv7` with a = -kk, b = kk a"
        notes = [row.note, *(f"`{a}` is `{b}`" for a, b in row.renamed.items())]
        yield f"| `fla.{row.path}.{row.name}` | {ours} | {'; '.join(filter(None, notes))} |"


def functions() -> Iterator[str]:
    """Functions that are no operators: of fla.ops and of fla.ops.utils."""
    for path, members in sorted(FUNCTIONS.items()):
        yield f"| `fla.{path}` | {code(f.__name__ for f in members)} |"
    prefix = f"{ROOT}.ops.utils."
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
    prefix = f"{ROOT}.modules."
    names = {x for x in sys.modules if x.startswith(prefix)}
    real = sorted(x for x in names if sys.modules[x].__name__ == x and public(x))
    for name in real:
        members = [x for x in public(name) if x not in OURS]
        ours = sorted({f"slipstream.nn.{NN[x]}" for x in members if x in NN})
        path = f"fla.modules.{name.removeprefix(prefix)}"
        yield f"| `{path}` | {code(iter(members))} | {code(iter(ours))} |"


def page() -> str:
    refused = (f"`{n}`" + (" (other than `None`)" if v is None else "") for n, v in REFUSED.items())
    head = HEAD.format(
        version=compat.__version__,
        models=textwrap.fill(MODELS, 100),
        hints=code(iter(sorted(HINTS))),
        refused=", ".join(refused),
        layers="\n".join(
            f"| `{theirs}` | `{MIXERS[mixer]}` | `{mixer}` |" for mixer, theirs in LAYERS.items()
        ),
    )
    lines = [
        *operators(),
        "",
        "## Other functions",
        "",
        "In plain torch, or on the operators above.",
        "",
        "| fla | names |",
        "|---|---|",
        *functions(),
        "",
        "## Modules",
        "",
        "`fla.modules` itself has all of the classes. fla 0.6 has moved some of these modules",
        "(`fla.modules.norm.layernorm`, `fla.modules.causal_conv1d`); both paths lead to the same.",
        "Styles for `parallelize_module`, on a mesh of one dimension:",
        f"{', '.join(f'`fla.{path}.{name}`' for path, name in PARALLEL.items() if '.' in path)}.",
        "",
        "| fla | names | in new code |",
        "|---|---|---|",
        *modules(),
        "",
        "## What Slipstream does not have",
        "",
        "These names raise an `ImportError`; so do the modules of `fla.ops` that are not above.",
        "",
        *(f"- `fla.{path}`: {code(iter(names))}" for path, names in sorted(MISSING.items())),
        "",
    ]
    return head + "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")

#!/bin/sh
# rwkv 0.8.32 (models of version 4 and 7), tokenizers 0.23.1, torch 2.13.0 (CPU).
#
# out, state = model.forward(tokens, state) looks like a function, and for version 7 on a CPU it is one: the list of
# states that is passed in stays as it was. Models of version 4 write their new states into that list and
# return it: a prompt's state that is to be used again (a second answer, a retry, a beam) has moved on by whatever
# was read since, no error is raised, and the second answer differs. Whoever tried it with version 7 learns nothing
# about the others; copy the list before the call.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" rwkv==0.8.32 tokenizers==0.23.1 torch==2.13.0 numpy
cat > "$dir/states.py" <<'EOF'
import os
import sys

version, path = sys.argv[1], sys.argv[2]
os.environ["RWKV_JIT_ON"] = "1"
os.environ["RWKV_CUDA_ON"] = "0"
if version == "7":
    os.environ["RWKV_V7_ON"] = "1"

import torch
from rwkv.model import RWKV

torch.manual_seed(0)
D, LAYERS, VOCABULARY, HIDDEN, RANK = 64, 2, 50, 128, 16
norms = {"ln_out": D, "blocks.0.ln0": D}
weights = {"emb.weight": torch.randn(VOCABULARY, D), "head.weight": torch.randn(VOCABULARY, D) * 0.3}
for layer in range(LAYERS):
    block, att, ffn = (f"blocks.{layer}.{x}" for x in ("", "att.", "ffn."))
    norms |= {block + "ln1": D, block + "ln2": D}
    for name in ("receptance", "key", "value", "output"):
        weights[f"{att}{name}.weight"] = torch.randn(D, D) * 0.15
    weights[ffn + "key.weight"] = torch.randn(HIDDEN, D) * 0.15
    weights[ffn + "value.weight"] = torch.randn(D, HIDDEN) * 0.15
    if version == "4":
        weights |= {f"{att}time_{x}": torch.randn(D) for x in ("decay", "first")}
        weights |= {f"{att}time_mix_{x}": torch.rand(1, 1, D) for x in "kvr"}
        weights |= {f"{ffn}time_mix_{x}": torch.rand(1, 1, D) for x in "kr"}
        weights[ffn + "receptance.weight"] = torch.randn(D, D) * 0.15
        continue
    weights |= {f"{att}x_{x}": torch.rand(1, 1, D) for x in "rwkvag"}
    for name in "wavg":
        weights[f"{att}{name}0"] = torch.randn(1, 1, D) * 0.3
        weights[f"{att}{name}1"] = torch.randn(D, RANK) * 0.1
        weights[f"{att}{name}2"] = torch.randn(RANK, D) * 0.1
    weights |= {att + "k_k": torch.ones(1, 1, D), att + "k_a": torch.ones(1, 1, D)}
    weights |= {att + "r_k": torch.randn(1, D) * 0.1, ffn + "x_k": torch.rand(1, 1, D)}
    norms[att + "ln_x"] = D
for name, width in norms.items():
    weights |= {name + ".weight": torch.ones(width), name + ".bias": torch.zeros(width)}
torch.save(weights, path + ".pth")

model = RWKV(model=path, strategy="cpu fp32")
_, prompt = model.forward([1, 2, 3], None)
before = [x.clone() for x in prompt]
first, after = model.forward([4, 5, 6], prompt)
again, _ = model.forward([4, 5, 6], prompt)
kept = all(torch.equal(x, y) for x, y in zip(prompt, before, strict=True))
copied, _ = model.forward([4, 5, 6], [x.clone() for x in before])
difference = float((first - again).abs().max())
print(f"version {version}: the prompt's state is kept {kept}, the result is the list passed {after is prompt}, "
      f"a second answer differs by {difference:.2f} of {float(first.abs().max()):.2f}")
assert torch.equal(first, copied)
assert kept == (version == "7") and (after is prompt) == (version == "4") and (difference > 0.1) == (version == "4")
EOF
for version in 4 7; do PYTHONPATH="$dir/lib" python3 -W ignore "$dir/states.py" "$version" "$dir/model" | tail -1; done

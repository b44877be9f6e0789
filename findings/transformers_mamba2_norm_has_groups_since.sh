#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.17.0 and 5.24.0.
#
# The same Mamba-2 weights give other logits in the two releases where n_groups is more than 1, as by
# default (8): the gated norm in front of out_proj takes its mean square over all
# channels in 5.17.0, over each group's in 5.24.0 (as mamba_ssm does). Prompt and decoding agree with
# each other in both, so no test of a release against itself shows it. With one group both agree.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat > "$dir/logits.py" <<'EOF'
import sys
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

results = []
for groups in (1, 2):
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=16, num_heads=8, head_dim=8,
        n_groups=groups, chunk_size=8, expand=2,
    )
    model = Mamba2ForCausalLM(config).eval()
    for i, (_, value) in enumerate(sorted(model.state_dict().items())):
        value.copy_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(i)))
    ids = torch.arange(21)[None] * 3 % 64
    cache, steps = None, []
    with torch.no_grad():
        whole = model(ids).logits
        for t in range(21):
            out = model(ids[:, t : t + 1], cache_params=cache, use_cache=True)
            cache = out.cache_params
            steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)
    results.append(whole)
torch.save(results, sys.argv[1])
EOF
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
for release in 5.17.0 5.24.0; do
    python3 -m pip install -q --no-compile --target "$dir/$release" transformers==$release
    PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/logits.py" "$dir/$release.pt"
done
PYTHONPATH="$dir/lib" python3 - "$dir/5.17.0.pt" "$dir/5.24.0.pt" <<'EOF'
import sys
import torch

old, new = (torch.load(x) for x in sys.argv[1:])
one, two = ((x - y).abs().max().item() for x, y in zip(old, new))
print("largest difference of logits: one group", one, " two groups", two, "of", new[1].abs().max().item())
assert one < 1e-5 and two > 0.05
EOF

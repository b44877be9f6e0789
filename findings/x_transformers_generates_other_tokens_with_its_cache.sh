#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0 (CPU).
#
# AutoregressiveWrapper.generate keeps keys and values unless told otherwise, and takes back the cache where the
# model says can_cache_kv False, as it does for selective attention. Models with shift_tokens, or with the decays of
# the Forgetting Transformer (attn_data_dependent_alibi), say True and decode other tokens than they compute without
# the cache: a step does not see the token before it, whose channels it should have mixed in, and the decays of
# earlier tokens are gone. No error, no warning. A model of the same size with rotary positions decodes the same
# tokens either way.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" x-transformers==2.31.10 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

KINDS = {
    "rotary positions": ({"rotary_pos_emb": True, "rotary_emb_dim": 32}, True, True),
    "selective": ({"attn_selective": True}, False, True),
    "shift_tokens": ({"shift_tokens": 1}, True, False),
    "forgetting decays": ({"attn_data_dependent_alibi": True}, True, False),
}
for name, (options, may_cache, same) in KINDS.items():
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, **options)
    model = TransformerWrapper(num_tokens=50, max_seq_len=128, attn_layers=layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    wrapped = AutoregressiveWrapper(model)
    prompts = torch.randint(0, 50, (4, 12))
    cached = wrapped.generate(prompts, 60, temperature=0.0)
    whole = wrapped.generate(prompts, 60, temperature=0.0, cache_kv=False)
    equal = float((cached == whole).float().mean())
    print(f"{name}: can_cache_kv {model.can_cache_kv}, {equal:.0%} of the tokens are those without a cache")
    assert model.can_cache_kv == may_cache and (equal == 1.0) == same
EOF

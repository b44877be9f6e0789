#!/bin/sh
# torch 2.13.0 (CPU), transformers 5.24.0; random weights.
#
# RecurrentGemma takes a cache and hands it to its attention layers alone. Windows of the convolutions and states of
# the recurrence are attributes of the modules, one set for the whole model, so that a step on a cache goes on from
# whatever text the model read last: a second conversation with a cache of its own, or a text that is scored with
# use_cache=False in between, which clears them. Beam search reorders the cache, the states stay with their rows, and
# it returns other tokens than without a cache. No error. Greedy decoding of one text at a time is right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, lru_width=32, attention_window_size=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, block_types=["recurrent", "recurrent", "attention"],
)  # fmt: skip
model = RecurrentGemmaForCausalLM(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1 and parameter.shape[0] != 64:
        parameter.data.mul_(3)
T = 12
text, other = torch.randint(2, 64, (2, 1, T + 1))


def read(ids):
    cache = DynamicCache(config=config)
    model(ids[:, :T], use_cache=True, cache=cache)
    return cache


with torch.no_grad():
    right = model(text, use_cache=False).logits[:, -1]
    for name in ("nothing", "a second conversation", "a text that is scored"):
        cache = read(text)
        if name == "a second conversation":
            read(other)
        elif name == "a text that is scored":
            model(other, use_cache=False)
        step = model(text[:, T:], use_cache=True, cache=cache, position_ids=torch.tensor([[T]])).logits[:, -1]
        moved = float((step - right).abs().max())
        print(f"{name} between prompt and step: logits up to {float(right.abs().max()):.2f} are off by {moved:.1e}")
        assert moved < 1e-5 if name == "nothing" else moved > 0.01
    kw = dict(attention_mask=torch.ones_like(text), max_new_tokens=12, do_sample=False)
    for beams in (1, 3):
        found = [model.generate(text, use_cache=use, num_beams=beams, **kw).tolist() for use in (True, False)]
        print(f"{beams} beams: {'the same' if found[0] == found[1] else 'other'} tokens with a cache and without")
        assert (found[0] == found[1]) == (beams == 1)
EOF

#!/bin/sh
# mlx-lm 0.32.2, mlx 0.32.4 on a CPU; random weights.
#
# mlx-lm's BatchGenerator, which its server runs, pads the shorter prompts of a batch on the right and
# tells each cache the lengths. Mamba-2, Qwen3-Next, Kimi-Linear and other recurrent layers read them.
# Mamba-1, Jamba, RWKV-7, OLMo-Hybrid, Nemotron-H, RecurrentGemma and Bailing's linear layers do not:
# their states run on over the padding, and a prompt continues with other tokens because a longer one
# came at the same time. Each model alone, in pieces or at once, is right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import importlib
import random

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

mx.set_default_device(mx.cpu)
SHARED = dict(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, norm_eps=1e-6, layer_norm_epsilon=1e-6, rope_theta=1e4,
    max_position_embeddings=512, tie_word_embeddings=False, attention_bias=False, use_bias=False, use_conv_bias=True,
    conv_kernel=4, time_step_rank=4, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
)
GDN = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32)
MODELS = {
    "mamba2": dict(num_heads=4, head_dim=32, state_size=32, n_groups=1, time_step_limit=(0.0, 100.0)),
    "qwen3_next": GDN | dict(
        linear_conv_kernel_dim=4, decoder_sparse_step=1, shared_expert_intermediate_size=32, mlp_only_layers=[],
        partial_rotary_factor=0.5, full_attention_interval=2,
    ),
    "mamba": dict(state_size=16),
    "jamba": dict(
        attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4,
        mamba_d_state=16, mamba_expand=2,
    ),
    "rwkv7": dict(
        head_dim=32, a_low_rank_dim=16, v_low_rank_dim=16, gate_low_rank_dim=16, decay_low_rank_dim=16
    ),
    "olmo_hybrid": GDN | dict(
        linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, layer_types=["linear_attention", "full_attention"]
    ),
    "nemotron_h": dict(
        mamba_num_heads=4, mamba_head_dim=32, mamba_proj_bias=False, ssm_state_size=32, n_groups=2, mlp_bias=False,
        hybrid_override_pattern=["M", "*"], time_step_limit=(0.0, 100.0),
    ),
}
HEEDS = {"mamba2", "qwen3_next"}


def build(name):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(SHARED | MODELS[name] | {"model_type": name}))
    weights = []
    for key, x in tree_flatten(model.parameters()):
        if "A_log" in key:
            new = mx.log(mx.random.uniform(0.5, 4.0, x.shape))
        elif x.ndim == 1:
            new = 0.3 * mx.random.normal(x.shape) + ("norm" in key)
        else:
            new = 1.5 * mx.random.normal(x.shape) / x.shape[-1] ** 0.5
        weights.append((key, new))
    model.load_weights(weights)
    return model


def first(model, prompts):
    """Log-probabilities of the first token that continues each prompt of one batch."""
    generator = BatchGenerator(model, max_tokens=1)
    ids = generator.insert(prompts)
    found = {}
    while len(found) < len(ids):
        found |= {r.uid: r.logprobs for r in generator.next()[1]}
    return [found[i] for i in ids]


random.seed(2)
short, long = ([random.randrange(64) for _ in range(n)] for n in (5, 19))
for name in MODELS:
    model = build(name)
    (alone,), (beside, _) = first(model, [short]), first(model, [short, long])
    off = mx.abs(alone - beside).max().item()
    print(f"{name}: beside a longer prompt off by {off:.1e}")
    assert (off < 1e-4) if name in HEEDS else (off > 0.1), name
EOF

"""QSA and MSA with the weights of transformers' Qwen4-Exp and MiniMax-M3, beside their layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from slipstream.layers import MSA, QSA
from tests.integrations.test_indexed_attention import MODELS, _alike, model_of
from tests.support.small_layers import make

# of equal scores transformers' takes the earlier block too
alike = _alike


def loaded(attention: Any, base: float, rotary_dim: int) -> QSA | MSA:
    """Our layer with the weights of one of theirs."""
    own, config = attention.indexer, attention.config
    sizes: dict[str, Any] = {
        "num_heads": config.num_attention_heads,
        "qk_norm": "zero_centered_rms",
    }
    sizes |= {"num_kv_heads": config.num_key_value_heads, "head_dim": attention.head_dim}
    sizes |= {"rotary_dim": rotary_dim, "rotary_base": base, "norm_eps": config.rms_norm_eps}
    q, (k, v) = attention.q_proj.weight, (attention.k_proj.weight, attention.v_proj.weight)
    if hasattr(own, "index_qk_proj"):
        sizes |= {"block": own.compress_ratio, "topk": own.block_topk, "output_gate": True}
        sizes |= {"index_heads": own.index_n_heads, "index_dim": own.index_head_dim}
        layer: QSA | MSA = QSA(config.hidden_size, **sizes)
        q, gate = q.unflatten(0, (sizes["num_heads"], 2, -1)).unbind(1)
        gates = {"g_proj.weight": gate.flatten(0, 1)}
        norms, projections = (own.q_layernorm, own.k_layernorm), own.index_qk_proj.weight
        q = q.flatten(0, 1)
    else:
        sizes |= {"block": own.block_size, "topk": own.topk_blocks, "local": own.local_blocks}
        layer, gates = MSA(config.hidden_size, index_dim=own.head_dim, **sizes), {}
        projections = torch.cat([own.q_proj.weight, own.k_proj.weight])
        norms = own.q_norm, own.k_norm
    weights = {"qkv_proj.weight": torch.cat([q, k, v]), "o_proj.weight": attention.o_proj.weight}
    weights |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight, **gates}
    weights |= {"index_q_norm": norms[0].weight, "index_k_norm": norms[1].weight}
    layer.load_state_dict(weights | {"index_proj.weight": projections})
    return layer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_layers_equal_those_of_transformers(name: str) -> None:
    model = model_of(name, "eager").eval()
    (first, *_) = (x for x in model.modules() if getattr(x, "indexer", None) is not None)
    (tables, *_) = (x for n, x in model.named_modules() if n.endswith("rotary_emb"))
    T, width = 37, first.config.hidden_size
    x, places = torch.randn(2, T, width), torch.arange(T)[None]
    cos, sin = tables(x, places.expand(2, -1))
    mask = torch.full((2, 1, T, T), torch.finfo(x.dtype).min).triu(1)
    want = first(x, (cos, sin), mask, position_ids=places)[0]
    base = float(first.config.rope_parameters["rope_theta"])
    layer = loaded(first, base, cos.shape[-1])
    got, state = layer(x[:, :20], use_cache=True)
    rest, _ = layer(x[:, 20:], state=state, use_cache=True)
    torch.testing.assert_close(torch.cat([got, rest], 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["QSA", "MSA"])
def test_indexers_alone_learn_from_their_loss(name: str) -> None:
    """Gradients of others are those without it."""
    with_loss, without = make(name), make(name, index_loss=0.0)
    without.load_state_dict(with_loss.state_dict())
    x = torch.randn(2, 20, with_loss.o_proj.out_features)
    grads: list[dict[str, Tensor | None]] = []
    for layer in (with_loss, without):
        layer(x)[0].square().sum().backward()
        grads.append({n: p.grad for n, p in layer.named_parameters()})
    for n, grad in grads[1].items():
        assert (grad is None) == n.startswith("index_"), n
        if grad is not None:
            torch.testing.assert_close(grads[0][n], grad)

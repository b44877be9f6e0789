"""Hyper-connections of transformers' models, on slipstream.ops.mhc_pre and mhc_post.

patch() puts the functions of FORWARDS in the place of forward of the classes of these names, layers
among them: what they do with a layer's output stands within their forward.
"""

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor

from slipstream.ops.hyper_connection import mhc_post, mhc_pre


def connection(self: Any, hidden_streams: Tensor) -> tuple[Any, ...]:
    """post, comb and what the layer reads; no comb of HYV4's, whose streams do not mix."""
    if alone := hasattr(self, "hc_post_magnitude"):
        more = {"magnitude": self.hc_post_magnitude, "post_eps": self.hc_eps}
    else:
        more = {"iterations": self.hc_sinkhorn_iters}
    more |= {"eps": self.hc_eps, "norm_eps": self.input_norm.eps}
    y, post, comb = mhc_pre(hidden_streams, self.fn, self.base, self.scale, **more)
    return (post, y) if alone else (post, comb, y)


def head(self: Any, x: Tensor) -> Tensor:
    weights = self.hc_fn, self.hc_base, self.hc_scale
    return mhc_pre(x, *weights, eps=self.eps, norm_eps=self.input_norm.eps)[0]


def deepseek_layer(self: Any, hidden_states: Tensor, input_ids: Any = None, **kwargs: Any) -> Any:
    post, comb, x = self.attn_hc(hidden_states)
    x, _ = self.self_attn(self.input_layernorm(x), **kwargs)
    hidden_states = mhc_post(hidden_states, x, post, comb)
    post, comb, x = self.ffn_hc(hidden_states)
    x = self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
    return mhc_post(hidden_states, x, post, comb)


def _to_linear(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A layer's arguments as a linear mixer takes them: not what an indexer reads, and with the
    cache under the name that it had in releases before 5.24."""
    indexed = ("position_ids", "use_cache", "position_embeddings", "prev_topk_indices")
    kwargs = {name: value for name, value in kwargs.items() if name not in indexed}
    if "past_key_values" in kwargs:
        kwargs["cache_params"] = kwargs.pop("past_key_values")
    return kwargs


def indexed_layer(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
    """GLM 5's and HYV4's, which hands on what its indexer has chosen."""
    post, *comb, x = self.attn_hc(hidden_states)
    x, chosen = self.input_layernorm(x), None
    if getattr(self, "block_type", None) == "linear_attention":
        x = self.self_attn(hidden_states=x, **_to_linear(kwargs))
    else:
        x, _, chosen = self.self_attn(hidden_states=x, **kwargs)
    hidden_states = mhc_post(hidden_states, x, post, *comb)
    post, *comb, x = self.ffn_hc(hidden_states)
    x = self.mlp(self.post_attention_layernorm(x))
    return mhc_post(hidden_states, x, post, *comb), chosen


def qwen4_exp_layer(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None,
    conv_mask: Any = None, ple_input_ids: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What enters the streams is a layer's output alone; what it reads is another gate's."""
    if self.ple is not None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        more = self.ple(hidden_states, ple_input_ids, cache, conv_mask=conv_mask)
        hidden_states = hidden_states + more
    x, streams, weights = self.attn_hyper_connection(hidden_states)
    if self.layer_type == "linear_attention":
        x = self.linear_attn(x, attention_mask=conv_mask, **_to_linear(kwargs))
    else:
        x, _ = self.self_attn(x, position_embeddings, attention_mask=attention_mask, **kwargs)
    x, streams, weights = self.mlp_hyper_connection(_injected(streams, x, weights))
    return _injected(streams, self.mlp(x), weights)


def _injected(streams: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """streams [B, T, N D] and y [B, T, D] by weights [B, T, N]."""
    return mhc_post(streams.unflatten(-1, (weights.shape[-1], -1)), y, weights).flatten(-2)


FORWARDS: dict[str, Callable] = {
    f"{model}{part}": forward
    for models, part, forward in (
        ("DeepseekV4 Glm5NextText HYV4 HYV4VL", "HyperConnection", connection),
        ("DeepseekV4 HYV4 HYV4VL", "HyperHead", head),
        ("DeepseekV4", "DecoderLayer", deepseek_layer),
        ("Glm5NextText HYV4 HYV4VL", "DecoderLayer", indexed_layer),
        ("Qwen4ExpText", "DecoderLayer", qwen4_exp_layer),
    )
    for model in models.split()
}
# what layers do that these functions know: a forward with more is another release's
_KNOWN = {
    *("attn_hc", "ffn_hc", "attn_hyper_connection", "mlp_hyper_connection", "input_layernorm"),
    *("post_attention_layernorm", "self_attn", "linear_attn", "mlp", "ple", "block_type"),
    *("layer_type", "dtype", "to", "float", "torch", "matmul", "transpose", "unsqueeze", "flatten"),
}


def code_of(function: Callable) -> CodeType:
    """Of a function within its decorators; of none where it is no function of Python."""
    return getattr(inspect.unwrap(function), "__code__", code_of.__code__)


def hyper_connected(cls: type[Any]) -> Callable | None:
    """What takes the place of a class's forward; None if that stays."""
    known = not cls.__name__.endswith("Layer") or _KNOWN.issuperset(code_of(cls.forward).co_names)
    return FORWARDS.get(cls.__name__) if known else None

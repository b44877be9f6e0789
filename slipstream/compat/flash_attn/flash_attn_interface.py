"""flash_attn.flash_attn_interface: attention of tensors apart, and of packed ones."""

from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.ops.flash_attn import flash_attn_func as flash_attn_func
from slipstream.ops.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from slipstream.ops.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache

_OPTIONS = (
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs * sinks"
)


def _packed(
    function: Callable[..., Any], name: str, tensor: str, layout: str, order: str
) -> Callable[..., Any]:
    """A function whose last tensors, q, k, v or k, v, are one, side by side in dimension -3."""
    count = len(tensor)
    added = {tensor: (Tensor, Parameter.empty)}
    both = [x for x in ("cu_seqlens", "max_seqlen") if x in order.split()]
    if both:  # of queries and keys
        added |= {"cu_seqlens": (Tensor, Parameter.empty)}
        added |= {"max_seqlen": (int | Tensor | None, None)}

    def change(found: dict[str, Any]) -> dict[str, Any]:
        x = found.pop(tensor)
        checks.expect_rank(tensor, x, layout.count(",") + 1, layout)
        if x.shape[-3] != count:
            raise ValueError(f"{tensor}: want {layout}, got shape {tuple(x.shape)}")
        for argument in both:
            if argument in found:
                found[f"{argument}_q"] = found[f"{argument}_k"] = found.pop(argument)
        return found | dict(zip(tensor, x.unbind(-3)))

    doc = f"{function.__name__} of {tensor} {layout}."
    return checks.operator(fixed(function, name, doc, order=order, added=added, change=change))


flash_attn_qkvpacked_func = _packed(
    flash_attn_func, "flash_attn_qkvpacked_func", "qkv", "[B, T, 3, H, D]", f"qkv {_OPTIONS}"
)
flash_attn_kvpacked_func = _packed(
    flash_attn_func, "flash_attn_kvpacked_func", "kv", "[B, S, 2, HKV, D]", f"q kv {_OPTIONS}"
)
flash_attn_varlen_qkvpacked_func = _packed(
    flash_attn_varlen_func, "flash_attn_varlen_qkvpacked_func", "qkv", "[T, 3, H, D]",
    f"qkv cu_seqlens max_seqlen {_OPTIONS}",
)  # fmt: skip
flash_attn_varlen_kvpacked_func = _packed(
    flash_attn_varlen_func, "flash_attn_varlen_kvpacked_func", "kv", "[S, 2, HKV, D]",
    f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {_OPTIONS}",
)  # fmt: skip

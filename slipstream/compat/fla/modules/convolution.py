"""fla.modules.convolution: the short causal convolution and its state."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compat.fla.ops.cp.context import plan_of
from slipstream.ops.conv import short_convolution, short_convolution_update


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution of x [B, T, D] with weight [D, W]; states are [N, D, W].

    Args:
        x: [B, T, D], or with more dimensions behind T, whose product is D.
        backend, cu_seqlens_cpu, chunk_indices: no effect.
        cp_context: of several ranks, with this rank's tokens; it has the offsets too.
        seq_idx: what cu_seqlens says in another form; not without it.

    Returns:
        y in x's shape, and the final state or None.
    """
    plan = plan_of(cp_context)
    if seq_idx is not None and cu_seqlens is None:
        raise NotImplementedError("seq_idx: want cu_seqlens beside it")
    if weight is None:
        raise ValueError("weight: want a tensor [D, W], got None")
    flat = x if x.shape[-1] == weight.shape[0] else x.flatten(2)
    y, state = short_convolution(
        flat,
        weight,
        bias,
        activation=activation,
        residual=None if residual is None else residual.reshape(flat.shape),
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens if plan is None else None,
        context=plan,
    )
    return y.view(x.shape), state


def causal_conv1d_cp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int | None = None,
    backend: str = "triton",
    residual: Tensor | None = None,
) -> Tensor:
    """y of causal_conv1d with a context; chunk_size has no effect."""
    if cp_context is None:
        raise ValueError("cp_context: want a context, got None")
    call = {"activation": activation, "backend": backend, "cp_context": cp_context}
    return causal_conv1d(x, weight, bias, residual, **call)[0]


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences; cache [N, D, W] is updated in place.

    Args:
        x: [N, D], [N, 1, D] or [1, N, D], or with the heads apart.

    Returns:
        y in x's shape, and cache.
    """
    if weight is None:
        raise ValueError("weight: want a tensor [D, W], got None")
    tokens = x.reshape(-1, weight.shape[0])
    added = None if residual is None else residual.reshape(tokens.shape)
    y = short_convolution_update(tokens, cache, weight, bias, activation=activation, residual=added)
    return y.view(x.shape), cache


class ShortConvolution(nn.Conv1d):
    """causal_conv1d with the parameters of a depthwise torch.nn.Conv1d.

    Args:
        hidden_size: D. kernel_size: W. bias: whether there is one.
        activation: "silu" ("swish") or None.
        backend, use_fast_conv1d: no effect.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("use_fast_conv1d", None) is not None:
            warnings.warn("use_fast_conv1d has no effect", DeprecationWarning, stacklevel=2)
        if kwargs:
            raise TypeError(f"ShortConvolution: unexpected arguments: {', '.join(kwargs)}")
        if activation not in (None, "silu", "swish"):
            raise ValueError(f'activation: want "silu", "swish" or None, got {activation!r}')
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            padding=kernel_size - 1,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Args:
            x: [B, T, D]. residual: added to the result. mask: [B, T], 0 for padding.
            cache: the state before [N, D, W]; with one token for each sequence, and without
                gradients, it is updated in place.

        Returns:
            y [B, T, D], and the state after, with output_final_state.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: want None beside cu_seqlens")
            x = x * mask.unsqueeze(-1)
        N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        one_each = (
            x.shape[0] * x.shape[1] == N
            and kwargs.get("cp_context") is None
            and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all()))
        )
        if one_each and not torch.is_grad_enabled():
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token of each sequence; cache is updated in place."""
        if cache is None:
            N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            cache = x.new_zeros(N, self.hidden_size, self.kernel_size[0])
        weight = self.weight.squeeze(1)
        y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"

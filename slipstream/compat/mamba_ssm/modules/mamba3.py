"""mamba_ssm.modules.mamba3: the block of Mamba-3, with that package's parameters and states."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat.mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
from slipstream.compat.mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
from slipstream.compat.mamba_ssm.ops.triton.layernorm_gated import RMSNorm
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import (
    apply_rotary_qk_inference_fwd,
)
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from slipstream.layers.base import expect_divisor

States = tuple[Tensor, Tensor, Tensor, Tensor]


class Mamba3(nn.Module):
    """Mamba-3 as mamba_ssm 2.3.2 has it: names of parameters, initialisation, forward and step.

    Args:
        d_model, d_state, expand, headdim, ngroups: D, N, inner width by D, P, heads of B and C.
        rope_fraction: share of the N channels that turn, 0.5 or 1.
        dt_min, dt_max, dt_init_floor, A_floor: of the initial steps; least -A.
        is_outproj_norm: y is normalised by heads and gated, in the place of the gate alone.
        is_mimo, mimo_rank: R inputs and outputs a token; R is 1 without is_mimo.
        layer_idx: place of the states in inference_params.key_value_memory_dict.
        chunk_size, dropout, n_layer, others: no effect.

    Raises:
        ValueError: P does not divide the inner width, ngroups is no divisor of the heads, or
            rope_fraction is another one.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction: want 0.5 or 1.0, got {rope_fraction}")
        self.d_model, self.d_state, self.headdim, self.expand = d_model, d_state, headdim, expand
        self.chunk_size, self.layer_idx, self.A_floor = chunk_size, layer_idx, A_floor
        self.is_outproj_norm, self.is_mimo = is_outproj_norm, is_mimo
        self.mimo_rank = R = mimo_rank if is_mimo else 1
        self.d_inner = int(expand * d_model)
        expect_divisor("headdim", headdim, "expand * d_model", self.d_inner)
        self.nheads = H = self.d_inner // headdim
        expect_divisor("ngroups", ngroups, "expand * d_model / headdim", H)
        self.num_bc_heads, self.rotary_dim_divisor = ngroups, int(2 / rope_fraction)
        self.num_rope_angles = int(d_state * rope_fraction) // 2
        made = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, sum(self._sizes), bias=False, **made)
        wide = {"device": device, "dtype": torch.float32}
        step = torch.empty(H, **wide).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        step = step.clamp(min=dt_init_floor)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(H, R, d_state, **wide)) for _ in "BC")
        self.B_norm, self.C_norm = (RMSNorm(d_state, eps=1e-5, **made) for _ in "BC")
        if is_mimo:
            shape = H, R, headdim
            self.mimo_x = nn.Parameter(torch.full(shape, 1 / R, **wide))
            self.mimo_z = nn.Parameter(torch.ones(shape, **wide))
            self.mimo_o = nn.Parameter(torch.full(shape, 1 / R, **wide))
        self.D = nn.Parameter(torch.ones(H, **wide))
        for x in (self.dt_bias, self.D):
            x._no_weight_decay = True  # type: ignore[attr-defined]
        if is_outproj_norm:
            self.norm = RMSNorm(
                self.d_inner, eps=1e-5, norm_before_gate=True, group_size=headdim, **made
            )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **made)

    @property
    def _sizes(self) -> list[int]:
        """Sizes of the parts of in_proj's output: z, x, B, C, dt, A, trap and angles."""
        of_bc, H = self.d_state * self.num_bc_heads * self.mimo_rank, self.nheads
        return [self.d_inner, self.d_inner, of_bc, of_bc, H, H, H, self.num_rope_angles]

    def forward(
        self,
        u: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """u [B, T, D] -> [B, T, D].

        Args:
            seq_idx: no effect, as there; cu_seqlens packs sequences in B = 1.
            inference_params: states are written to its key_value_memory_dict; where its
                seqlen_offset is above 0, u is one token, [B, D] or [B, 1, D].
        """
        states = None
        if inference_params is not None:
            N = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            states = self._get_states_from_cache(inference_params, N)
            if inference_params.seqlen_offset > 0:
                y = self.step(u if u.dim() == 2 else u[:, 0], *states)[0]
                return y if u.dim() == 2 else y[:, None]
        z, x, B, C, dt, A, trap, angles = self.in_proj(u).split(self._sizes, dim=-1)
        z, x = (t.unflatten(-1, (self.nheads, -1)) for t in (z, x))
        B, C = self._normed(B, C)
        dt, rate = self._steps(dt, A)
        angles = angles[:, :, None].expand(-1, -1, self.nheads, -1).float()
        given: dict[str, Any] = {"V": x, "ADT": (rate * dt).mT, "DT": dt.mT, "Trap": trap.mT}
        given |= {"Angles": angles, "D": self.D, "Z": None if self.is_outproj_norm else z}
        given |= {"chunk_size": self.chunk_size, "cu_seqlens": cu_seqlens}
        if self.is_mimo:
            y = mamba3_mimo(
                Q=C, K=B, Q_bias=self.C_bias, K_bias=self.B_bias, MIMO_V=self.mimo_x,
                MIMO_Z=self.mimo_z, MIMO_Out=None if self.is_outproj_norm else self.mimo_o,
                rotary_dim_divisor=self.rotary_dim_divisor, dtype=x.dtype,
                return_state=states is not None, **given,
            )  # fmt: skip
        else:
            y = mamba3_siso_combined(
                Q=C.squeeze(2), K=B.squeeze(2), Q_bias=self.C_bias.squeeze(1),
                K_bias=self.B_bias.squeeze(1), return_final_states=states is not None, **given,
            )  # fmt: skip
        if states is not None:
            y, *after = y
            for old, new in zip(states, after, strict=True):
                old.copy_(new.detach().view_as(old))
        if self.is_outproj_norm:
            y = self._normed_and_gated(y, z) if self.is_mimo else self._gated(y, z)
        return self.out_proj(y.flatten(-2).to(x.dtype))

    def step(
        self, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One token, u [B, D], by plain torch; the states of allocate_inference_cache are changed
        in place. Returns y [B, D] and the states."""
        z, x, B, C, dt, A, trap, angles = self.in_proj(u).split(self._sizes, dim=-1)
        z, x = (t.unflatten(-1, (self.nheads, -1)) for t in (z, x))
        B, C = (
            t.repeat_interleave(self.nheads // self.num_bc_heads, 2) for t in self._normed(B, C)
        )
        dt, rate = self._steps(dt, A)
        angles = angles[:, None].expand(-1, self.nheads, -1)
        C, B, theta = apply_rotary_qk_inference_fwd(
            q=C, k=B, angle_state=angle_state, angle_proj=angles, dt=dt,
            bias_q=self.C_bias.transpose(0, 1), bias_k=self.B_bias.transpose(0, 1),
            conjugate=False, inplace=False, rotate_pairwise=not self.is_mimo,
        )  # fmt: skip
        ones = x.new_ones(self.mimo_rank, self.nheads, self.headdim)
        of_x, of_z, of_o = ones, ones, ones
        if self.is_mimo:
            weights = self.mimo_x, self.mimo_z, self.mimo_o
            of_x, of_z, of_o = (w.transpose(0, 1).contiguous() for w in weights)
        normed = self.is_outproj_norm
        y = x.new_empty(x.shape[0], self.mimo_rank, *x.shape[1:]) if normed else torch.empty_like(x)
        mamba3_step_fn(
            ssm_state, k_state, v_state, rate, B, C, self.D, x, dt, torch.sigmoid(trap), of_x,
            outproj=None if normed else of_o, state_out=None, out=y, z=None if normed else z,
            zproj=None if normed else of_z,
        )  # fmt: skip
        if normed and self.is_mimo:
            y = self._normed_and_gated(y[:, None], z[:, None])[:, 0]
        elif normed:
            y = self._gated(y[:, 0], z)
        for old, new in zip((angle_state, k_state, v_state), (theta, B, x), strict=True):
            old.copy_(new.detach())
        return self.out_proj(y.flatten(-2).to(x.dtype)), angle_state, ssm_state, k_state, v_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, device: Any = None, dtype: Any = None,
        inplace_state: Any = None, **kwargs: Any,
    ) -> States:  # fmt: skip
        """Zeros: angles [B, H, A] and states [B, H, P, N] in float32, keys [B, R, H, N] and values
        [B, H, P] in `dtype`, that of in_proj if None."""
        weight, H = self.in_proj.weight, self.nheads
        like = weight.new_empty(0, device=device, dtype=dtype)
        return (
            like.new_zeros(batch_size, H, self.num_rope_angles, dtype=torch.float32),
            like.new_zeros(batch_size, H, self.headdim, self.d_state, dtype=torch.float32),
            like.new_zeros(batch_size, self.mimo_rank, H, self.d_state),
            like.new_zeros(batch_size, H, self.headdim),
        )

    def _get_states_from_cache(self, inference_params: Any, batch_size: int) -> States:
        if self.layer_idx is None:
            raise ValueError("layer_idx: want an integer with inference_params, got None")
        memory = inference_params.key_value_memory_dict
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        return memory[self.layer_idx]

    def _normed(self, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """[..., R G N] -> [..., R, G, N]"""
        sizes = self.mimo_rank, self.num_bc_heads, self.d_state
        return self.B_norm(B.unflatten(-1, sizes)), self.C_norm(C.unflatten(-1, sizes))

    def _steps(self, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(dt + self.dt_bias), (-F.softplus(A.float())).clamp(max=-self.A_floor)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm(y.flatten(-2), z.flatten(-2)).unflatten(-1, (self.nheads, -1))

    def _normed_and_gated(self, y: Tensor, z: Tensor) -> Tensor:
        """y [B, T, R, H, P] and z [B, T, H, P] -> [B, T, H, P]"""
        z = z.float()[:, :, None] * self.mimo_z.transpose(0, 1)
        return (self._gated(y.float(), z) * self.mimo_o.transpose(0, 1)).sum(2)

"""The operators around RWKV-7's recurrence, forward and backward; ../rwkv7.py has the formulas.

R tokens of H heads of K channels, D = H K. A program has a tile of BR tokens of one head, backward
every P-th one of that head: its sums over tokens, for the gradients of the parameters, stay in
registers, and another kernel adds up those of the programs in an order that does not change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives.device import add_partial_sums
from slipstream.kernels.time_mix.inputs import (
    EPS,
    SLOWEST_LOG_DECAY,
    OutputInputs,
    TermsGrads,
    TermsInputs,
)
from slipstream.runtime import backends, launch_cache

# Elements of a tile.
FORWARD = 1024
# Of each backward, programs at a time on each multiprocessor, and warps; of the terms' by the
# channels of a head, so that a warp has one token's, whose sums then are shuffles.
TERMS_BACKWARD = {64: (256, 9, 4), 128: (512, 5, 4), 256: (1024, 2, 4)}
OUTPUT_BACKWARD = (1024, 4, 4)


@triton.jit
def _channels(K: tl.constexpr, BK: tl.constexpr):
    """Those of the program's head among all, [1, BK], and which there are."""
    o_k = tl.arange(0, BK)[None, :]
    return tl.program_id(1) * K + o_k, o_k < K


@triton.jit
def _tile(i, o_d, m_d, R, D: tl.constexpr, BR: tl.constexpr):
    """Offsets of tile i of a [R, D] tensor, and which of them there are."""
    o_r = i * BR + tl.arange(0, BR)[:, None]
    return o_r.to(tl.int64) * D + o_d, (o_r < R) & m_d


@triton.jit
def _load(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _maybe(p, o, m):
    b = 0.0
    if p is not None:
        b = _load(p, o, m)
    return b


@triton.jit
def _store(p, o, x, m):
    tl.store(p + o, x.to(p.dtype.element_ty), mask=m)


@triton.jit
def _unit(z, eps):
    """z of norm 1, and the factor"""
    r = tl.rsqrt(tl.sum(z * z, 1, keep_dims=True) + eps)
    return z * r, r


@triton.jit
def _normed(x, m, eps, K: tl.constexpr):
    """x of mean 0 and variance 1, and the factor"""
    x = tl.where(m, x - tl.sum(x, 1, keep_dims=True) / K, 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / K + eps)
    return x * r, r


@triton.jit(do_not_specialize=["R"])
def rwkv7_terms_fwd_kernel(
    w_ptr, k_ptr, a_ptr, v_ptr, v_gate_ptr, first_value_ptr, k_k_ptr, k_a_ptr,
    w_bias_ptr, a_bias_ptr, v_bias_ptr,
    w_out_ptr, k_out_ptr, a_out_ptr, b_out_ptr, v_out_ptr, R, slowest, eps,
    D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR, H). Tensors [R, D], parameters [D]; v, v_gate, first_value, v_out and biases
    may be None."""
    o_d, m_d = _channels(K, BK)
    o, m = _tile(tl.program_id(0), o_d, m_d, R, D, BR)
    b_k, b_a = _load(k_ptr, o, m), tl.sigmoid(_load(a_ptr, o, m) + _maybe(a_bias_ptr, o_d, m_d))
    b_w = tl.sigmoid(_load(w_ptr, o, m) + _maybe(w_bias_ptr, o_d, m_d))
    _store(w_out_ptr, o, slowest * b_w, m)
    b_unit, _ = _unit(b_k * _load(k_k_ptr, o_d, m_d), eps)
    _store(a_out_ptr, o, -b_unit, m)
    _store(b_out_ptr, o, b_unit * b_a, m)
    _store(k_out_ptr, o, b_k * (1 + (b_a - 1) * _load(k_a_ptr, o_d, m_d)), m)
    if v_ptr is not None:
        b_s = tl.sigmoid(_load(v_gate_ptr, o, m) + _maybe(v_bias_ptr, o_d, m_d))
        b_v = _load(v_ptr, o, m)
        _store(v_out_ptr, o, b_v + (_load(first_value_ptr, o, m) - b_v) * b_s, m)


@triton.jit(do_not_specialize=["R"])
def rwkv7_terms_bwd_kernel(
    dw_out_ptr, dk_out_ptr, da_out_ptr, db_out_ptr, dv_out_ptr, dk_read_ptr, dv_read_ptr,
    w_ptr, k_ptr, a_ptr, v_ptr, v_gate_ptr, first_value_ptr, k_k_ptr, k_a_ptr,
    w_bias_ptr, a_bias_ptr, v_bias_ptr,
    dw_ptr, dk_ptr, da_ptr, dv_ptr, dv_gate_ptr, dfirst_value_ptr, partial_ptr, R, slowest, eps,
    D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (P, H). dk_read, dv_read: more of the gradients of k and v, or None. partial [P, 5, D]:
    of k_k, k_a and the biases"""
    o_d, m_d = _channels(K, BK)
    b_kk, b_ka = _load(k_k_ptr, o_d, m_d), _load(k_a_ptr, o_d, m_d)
    # each thread adds up its own elements, and all of them once, at the end
    b_dkk, b_dka = tl.zeros([BR, BK], tl.float32), tl.zeros([BR, BK], tl.float32)
    b_sum_w, b_sum_a, b_sum_v = b_dkk, b_dkk, b_dkk
    b_w0, b_a0 = _maybe(w_bias_ptr, o_d, m_d), _maybe(a_bias_ptr, o_d, m_d)
    b_v0 = _maybe(v_bias_ptr, o_d, m_d)
    for i in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        o, m = _tile(i, o_d, m_d, R, D, BR)
        # all loads before the first store, which none of them may pass: else the loop waits for
        # memory four times; past the last row what comes in is 0, and so are all gradients
        b_w, b_dw = _load(w_ptr, o, m), _load(dw_out_ptr, o, m)
        b_k, b_a = _load(k_ptr, o, m), _load(a_ptr, o, m)
        b_db, b_dk, b_da_out = (
            _load(db_out_ptr, o, m),
            _load(dk_out_ptr, o, m),
            _load(da_out_ptr, o, m),
        )
        b_dk_read = _maybe(dk_read_ptr, o, m)
        b_dv, b_dv_read = _maybe(dv_out_ptr, o, m), _maybe(dv_read_ptr, o, m)
        b_gate, b_first, b_v = (
            _maybe(v_gate_ptr, o, m),
            _maybe(first_value_ptr, o, m),
            _maybe(v_ptr, o, m),
        )
        b_w = tl.sigmoid(b_w + b_w0)
        b_dw = b_dw * slowest * b_w * (1 - b_w)
        _store(dw_ptr, o, b_dw, m)
        b_sum_w += b_dw
        b_a = tl.sigmoid(b_a + b_a0)
        b_unit, b_r = _unit(b_k * b_kk, eps)
        b_dk += b_dk_read
        b_da = (b_db * b_unit + b_dk * b_k * b_ka) * b_a * (1 - b_a)
        _store(da_ptr, o, b_da, m)
        b_sum_a += b_da
        b_dka += b_dk * b_k * (b_a - 1)
        b_dunit = b_db * b_a - b_da_out
        # through the norm: what lies along the unit vector does not change it
        b_dz = b_r * (b_dunit - b_unit * tl.sum(b_dunit * b_unit, 1, keep_dims=True))
        b_dkk += b_dz * b_k
        _store(dk_ptr, o, b_dz * b_kk + b_dk * (1 + (b_a - 1) * b_ka), m)
        if v_ptr is not None:
            b_dv += b_dv_read
            b_s = tl.sigmoid(b_gate + b_v0)
            _store(dv_ptr, o, b_dv * (1 - b_s), m)
            _store(dfirst_value_ptr, o, b_dv * b_s, m)
            b_dgate = b_dv * (b_first - b_v) * b_s * (1 - b_s)
            _store(dv_gate_ptr, o, b_dgate, m)
            b_sum_v += b_dgate
    p_partial = partial_ptr + tl.program_id(0) * 5 * D
    _store(p_partial, o_d, tl.sum(b_dkk, 0, keep_dims=True), m_d)
    _store(p_partial + D, o_d, tl.sum(b_dka, 0, keep_dims=True), m_d)
    # a bias that is not given has no gradient, and its row of partial is not read
    if w_bias_ptr is not None:
        _store(p_partial + 2 * D, o_d, tl.sum(b_sum_w, 0, keep_dims=True), m_d)
    if a_bias_ptr is not None:
        _store(p_partial + 3 * D, o_d, tl.sum(b_sum_a, 0, keep_dims=True), m_d)
    if v_bias_ptr is not None:
        _store(p_partial + 4 * D, o_d, tl.sum(b_sum_v, 0, keep_dims=True), m_d)


@triton.jit(do_not_specialize=["R"])
def rwkv7_output_kernel(
    dy_ptr, o_ptr, r_ptr, k_ptr, v_ptr, gate_ptr, weight_ptr, bias_ptr, r_k_ptr, y_ptr,
    do_ptr, dr_ptr, dk_ptr, dv_ptr, dgate_ptr, partial_ptr, R, eps,
    D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (P, H). Tensors [R, D], parameters [D]. y; or of dy gradients and partial [P, 3, D]: of
    weight, bias and r_k"""
    o_d, m_d = _channels(K, BK)
    b_weight, b_bias = _load(weight_ptr, o_d, m_d), _load(bias_ptr, o_d, m_d)
    b_r_k = _load(r_k_ptr, o_d, m_d)
    # as in rwkv7_terms_bwd_kernel
    b_dweight, b_dbias = tl.zeros([BR, BK], tl.float32), tl.zeros([BR, BK], tl.float32)
    b_dr_k = tl.zeros([BR, BK], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        o, m = _tile(i, o_d, m_d, R, D, BR)
        # as there, all loads before the first store
        b_dy = _maybe(dy_ptr, o, m)
        b_v, b_gate = _load(v_ptr, o, m), _load(gate_ptr, o, m)
        # backward makes y again from these: reading it would be one more tensor of tokens
        b_n, b_rstd = _normed(_load(o_ptr, o, m), m, eps, K)
        b_r, b_k = _load(r_ptr, o, m), _load(k_ptr, o, m)
        b_s = tl.sum(b_r * b_k * b_r_k, 1, keep_dims=True)
        b_y = b_n * b_weight + b_bias + b_s * b_v
        if dy_ptr is None:
            _store(y_ptr, o, b_y * b_gate, m)
        else:
            _store(dgate_ptr, o, b_dy * b_y, m)
            b_dy = b_dy * b_gate
            b_dweight += b_dy * b_n
            b_dbias += b_dy
            b_dn = b_dy * b_weight
            b_mean = tl.sum(b_dn, 1, keep_dims=True) / K
            b_along = tl.sum(b_dn * b_n, 1, keep_dims=True) / K
            _store(do_ptr, o, b_rstd * (b_dn - b_mean - b_n * b_along), m)
            _store(dv_ptr, o, b_dy * b_s, m)
            b_ds = tl.sum(b_dy * b_v, 1, keep_dims=True)
            _store(dr_ptr, o, b_ds * b_k * b_r_k, m)
            _store(dk_ptr, o, b_ds * b_r * b_r_k, m)
            b_dr_k += b_ds * b_r * b_k
    if dy_ptr is not None:
        p_partial = partial_ptr + tl.program_id(0) * 3 * D
        _store(p_partial, o_d, tl.sum(b_dweight, 0, keep_dims=True), m_d)
        _store(p_partial + D, o_d, tl.sum(b_dbias, 0, keep_dims=True), m_d)
        _store(p_partial + 2 * D, o_d, tl.sum(b_dr_k, 0, keep_dims=True), m_d)


def terms(inputs: TermsInputs, heads: int) -> list[Tensor]:
    """w, k, a, b and, if it is given, v, each [B, T, H, K]."""
    w, k = inputs.w, inputs.k
    sizes = _sizes(w, heads, FORWARD)
    w_out = _heads(w, heads, torch.float32)
    k_out, a_out, b_out = (_heads(k, heads) for _ in range(3))
    v_out = None if inputs.v is None else _heads(inputs.v, heads)
    launch_cache.cached(rwkv7_terms_fwd_kernel)[(-(-sizes["R"] // sizes["BR"]), heads)](
        **_contiguous(inputs),
        w_out_ptr=w_out,
        k_out_ptr=k_out,
        a_out_ptr=a_out,
        b_out_ptr=b_out,
        v_out_ptr=v_out,
        slowest=SLOWEST_LOG_DECAY,
        eps=EPS,
        **sizes,
        num_warps=4,
    )
    return [x for x in (w_out, k_out, a_out, b_out, v_out) if x is not None]


def terms_backward(douts: TermsGrads, inputs: TermsInputs, heads: int) -> list[Tensor]:
    """Gradients of the tensors that there are, in their order."""
    w = inputs.w
    elements, per_processor, warps = _terms_tile(w.shape[2] // heads)
    sizes = _sizes(w, heads, elements)
    P = _programs(w, sizes, heads, per_processor)
    grads = {name: None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
             for name, x in inputs._asdict().items()}  # fmt: skip
    of_tokens, parameters = [*grads][:6], [*grads.values()][6:]
    partial = torch.empty(P, len(parameters), sizes["D"], dtype=torch.float32, device=w.device)
    launch_cache.cached(rwkv7_terms_bwd_kernel)[(P, heads)](
        **_contiguous(douts),
        **_contiguous(inputs),
        **{f"d{name}_ptr": grads[name] for name in of_tokens},
        partial_ptr=partial,
        slowest=SLOWEST_LOG_DECAY,
        eps=EPS,
        **sizes,
        num_warps=warps,
    )
    add_partial_sums(partial, parameters)
    return [x for x in grads.values() if x is not None]


def _terms_tile(K: int) -> tuple[int, int, int]:
    """The tile of terms_backward."""
    return next((tile for k, tile in TERMS_BACKWARD.items() if k >= K), TERMS_BACKWARD[256])


def output(inputs: OutputInputs, eps: float) -> Tensor:
    """[B, T, D]"""
    o, gate = inputs.o, inputs.gate
    sizes, heads = _sizes(gate, o.shape[2], FORWARD), o.shape[2]
    y = torch.empty(gate.shape, dtype=o.dtype, device=o.device)
    grads = dict.fromkeys(f"{x}_ptr" for x in ("dy", "do", "dr", "dk", "dv", "dgate", "partial"))
    launch_cache.cached(rwkv7_output_kernel)[(-(-sizes["R"] // sizes["BR"]), heads)](
        **_contiguous(inputs), **grads, y_ptr=y, eps=eps, **sizes, num_warps=4
    )
    return y


def output_backward(dy: Tensor, inputs: OutputInputs, eps: float) -> list[Tensor]:
    """Gradients of all other tensors, in their order."""
    o, gate = inputs.o, inputs.gate
    (elements, per_processor, warps), heads = OUTPUT_BACKWARD, o.shape[2]
    sizes = _sizes(gate, heads, elements)
    P = _programs(gate, sizes, heads, per_processor)
    grads = {name: torch.empty(x.shape, dtype=x.dtype, device=x.device)
             for name, x in inputs._asdict().items()}  # fmt: skip
    of_tokens, parameters = [*grads][:5], [*grads.values()][5:]
    partial = torch.empty(P, 3, sizes["D"], dtype=torch.float32, device=o.device)
    # rows past the last are zeros, and their norm is to be zero too: sums over rows have it
    eps = max(eps, torch.finfo(torch.float32).tiny)
    launch_cache.cached(rwkv7_output_kernel)[(P, heads)](
        dy_ptr=dy.contiguous(),
        **_contiguous(inputs),
        y_ptr=None,
        **{f"d{name}_ptr": grads[name] for name in of_tokens},
        partial_ptr=partial,
        eps=eps,
        **sizes,
        num_warps=warps,
    )
    add_partial_sums(partial, parameters)
    return [*grads.values()]


def _contiguous(inputs: TermsInputs | TermsGrads | OutputInputs) -> dict[str, Tensor | None]:
    """Arguments of a kernel."""
    named = inputs._asdict().items()
    return {f"{name}_ptr": x if x is None else x.contiguous() for name, x in named}


def _heads(x: Tensor, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for x [B, T, D] as [B, T, H, K]."""
    shape = (*x.shape[:2], heads, x.shape[2] // heads)
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def _sizes(x: Tensor, heads: int, elements: int) -> dict[str, int]:
    """The sizes and strides of x [B, T, D] that all kernels take."""
    D = x.shape[2]
    K = D // heads
    BK = triton.next_power_of_2(K)
    return {"R": x.numel() // D, "D": D, "K": K, "BR": max(elements // BK, 1), "BK": BK}


def _programs(x: Tensor, sizes: dict[str, int], heads: int, per_processor: int) -> int:
    """Programs of the backward pass for each head."""
    max_programs = max(backends.sm_count(x.get_device()) * per_processor // heads, 1)
    return min(-(-sizes["R"] // sizes["BR"]), max_programs)

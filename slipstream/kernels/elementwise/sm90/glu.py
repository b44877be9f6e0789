"""The products that make a gated MLP's gate and up, with the activation where their sums are.

    gate = x W_gate^T    up = x W_up^T    h = f(gate) up

x [M, D]; W_gate, W_up [F, D]; gate, up, h [M, F], of which h is made without reading the others.

A persistent program takes every P-th tile of 128 rows and 128 columns of each.

    _load_partition, 1 warp         _multiply, c = 0 and 1: 4 warps and 64 rows of the tile each
      slices of x and of  -- full -->   both sums += x w^T; the slice before is returned
      both weights                      arrive at empty
      waits for empty                   64 columns at a time: gate, up and h, through two buffers a
                                        warpgroup, by TMA to memory

    buffers            stages       arrivals a phase: full / empty
    x [64, BK] x 2     STAGES       1 (TMA), with both w / 2
    w [128, BK] x 2    STAGES
    out [64, 64]       2 each       no barrier: store_wait

A slice's products are waited for after the next one's were issued, so that the tensor cores always
have some. The loads of a tile run ahead while the one before it is written. Tiles go in groups of
GROUP rows of tiles, column by column, so that those at work at one time share what they read in
the L2 cache. TMA skips what is beyond the edges, and reads 0 there.

Symbols: c warpgroup, i_m and i_n a tile's row and column, i_step the slice over all tiles.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    gl,
    gluon,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.persistent_gemm import (
    alloc_ring_barriers,
    begin_slice,
    free_slice_before,
    halves,
    locate_tile,
    wait_for_slice,
    write_tile,
)
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached

# K at a time, how many of these are loaded ahead, and rows of tiles that share what they read
BK, STAGES, GROUP = 64, 4, 8


@gluon.jit
def _load_partition(
    x_desc, gate_w_desc, up_w_desc, x_s, w_s, full, empty, M, N, K,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # what one phase of `full` waits for: both warpgroups' x, and both weights
    nbytes: gl.constexpr = 2 * x_desc.block_type.nbytes + 2 * gate_w_desc.block_type.nbytes
    m_tiles, n_tiles, k_tiles = gl.cdiv(M, 128), gl.cdiv(N, 128), gl.cdiv(K, BK)
    # counts on over tiles: the next one's slices are loaded while this one is written
    i_step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = locate_tile(i, m_tiles, n_tiles, GROUP)
        for i_k in range(k_tiles):
            stage, bar = begin_slice(full, empty, i_step, STAGES, nbytes)
            for c in gl.static_range(2):
                copy_in(x_desc, [i_m * 128 + c * 64, i_k * BK], bar, x_s.index(2 * stage + c))
            copy_in(gate_w_desc, [i_n * 128, i_k * BK], bar, w_s.index(2 * stage))
            copy_in(up_w_desc, [i_n * 128, i_k * BK], bar, w_s.index(2 * stage + 1))
            i_step += 1


@gluon.jit
def _multiply_slices(
    c: gl.constexpr, x_s, w_s, full, empty, b_gate, b_up, i_step, k_tiles, STAGES: gl.constexpr
):
    """Both sums plus the products of a tile's slices, from `i_step` on."""
    for i_k in range(k_tiles):
        stage = wait_for_slice(full, i_step, STAGES)
        x = x_s.index(2 * stage + c)
        gate_w = w_s.index(2 * stage).permute((1, 0))
        up_w = w_s.index(2 * stage + 1).permute((1, 0))
        gate_token = warpgroup_mma(x, gate_w, b_gate, is_async=True)
        up_token = warpgroup_mma(x, up_w, b_up, is_async=True)
        # these two stay in flight; the slice of those before has been read
        b_gate, b_up = warpgroup_mma_wait(2, deps=(gate_token, up_token))
        free_slice_before(empty, i_step, STAGES, i_k > 0)
        i_step += 1
    # the last slice too, before the sums are read
    b_gate, b_up = warpgroup_mma_wait(0, deps=(b_gate, b_up))
    free_slice_before(empty, i_step, STAGES)
    return b_gate, b_up


@gluon.jit
def _sigmoid(x):
    """Two instructions of the unit that has exponentials, which a tile's end waits for."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=r,r",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _activation(x, ACTIVATION: gl.constexpr):
    """f, as triton/glu.py has it."""
    if ACTIVATION == "relu2":
        r = gl.where(x < 0.0, 0.0, x)
        f = r * r
    elif ACTIVATION == "gelu":
        f = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        f = x * _sigmoid(x)
    else:
        f = _sigmoid(x)
    return f


@gluon.jit
def _multiply(
    c: gl.constexpr, gate_desc, up_desc, h_desc, x_s, w_s, out_s, full, empty, M, N, K,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    m_tiles, n_tiles, k_tiles = gl.cdiv(M, 128), gl.cdiv(N, 128), gl.cdiv(K, BK)
    i_step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = locate_tile(i, m_tiles, n_tiles, GROUP)
        # a warpgroup has 64 rows of the tile and all its columns: both read w from one copy
        b_gate = gl.zeros([64, 128], gl.float32, layout)
        b_up = gl.zeros([64, 128], gl.float32, layout)
        b_gate, b_up = _multiply_slices(
            c, x_s, w_s, full, empty, b_gate, b_up, i_step, k_tiles, STAGES
        )
        i_step += k_tiles
        row = i_m * 128 + c * 64
        gates, ups = halves(b_gate), halves(b_up)
        # three results of 64 columns through two buffers, which change places with each
        for j in gl.static_range(2):
            col, first, second = (
                i_n * 128 + j * 64,
                out_s.index(2 * c + j),
                out_s.index(2 * c + 1 - j),
            )
            write_tile(gates[j], gate_desc, first, row, col)
            write_tile(ups[j], up_desc, second, row, col)
            write_tile(_activation(gates[j], ACTIVATION) * ups[j], h_desc, first, row, col)
    # shared memory is to outlive the last stores
    store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def glu_products_sm90_kernel(
    x_desc, gate_w_desc, up_w_desc, gate_desc, up_desc, h_desc, M, N, K,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Grid (P). Descriptors of [64, BK], [128, BK] and, of results, [64, 64]. N is F, K is D."""
    x_s = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(gate_w_desc.dtype, [2 * STAGES, 128, BK], gate_w_desc.layout)
    out_s = gl.allocate_shared_memory(h_desc.dtype, [4, 64, 64], h_desc.layout)
    full, empty = alloc_ring_barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                0, gate_desc, up_desc, h_desc, x_s, w_s, out_s, full, empty, M, N, K,
                BK, GROUP, STAGES, ACTIVATION,
            )),
            (_multiply, (
                1, gate_desc, up_desc, h_desc, x_s, w_s, out_s, full, empty, M, N, K,
                BK, GROUP, STAGES, ACTIVATION,
            )),
            (_load_partition, (
                x_desc, gate_w_desc, up_w_desc, x_s, w_s, full, empty, M, N, K,
                BK, GROUP, STAGES,
            )),
        ],
        # warps and registers a thread: what one warp that loads leaves over holds 64 x 256 sums
        [4, 1],
        [240, 24],
    )  # fmt: skip


def products(x: Tensor, gate_weight: Tensor, up_weight: Tensor, f: str) -> tuple[Tensor, ...]:
    """gate, up, h: [M, F]."""
    (M, K), N = x.shape, gate_weight.shape[0]
    gate, up, h = (torch.empty(M, N, dtype=x.dtype, device=x.device) for _ in range(3))
    tiles = -(-M // 128) * -(-N // 128)
    with device_of(x.device):
        cached(glu_products_sm90_kernel)[(min(tiles, sm_count(x.get_device())),)](
            x_desc=_descriptor(x, (64, BK)),
            gate_w_desc=_descriptor(gate_weight, (128, BK)),
            up_w_desc=_descriptor(up_weight, (128, BK)),
            gate_desc=_descriptor(gate, (64, 64)),
            up_desc=_descriptor(up, (64, 64)),
            h_desc=_descriptor(h, (64, 64)),
            M=M,
            N=N,
            K=K,
            BK=BK,
            GROUP=GROUP,
            STAGES=STAGES,
            ACTIVATION=f,
            num_warps=4,
            # of 12 warps, of which the compiler takes 9; the warpgroups then take 240, the loads 24
            maxnreg=168,
        )
    return gate, up, h


def _descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    # tests run the kernel above where there are none
    from slipstream.kernels.primitives.gluon_compat import TensorDescriptor

    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout: Any = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""The warps of backward_fused.py that add the tiles of dq, one after another, in global memory."""

from slipstream.kernels.gluon import copy_out, gl, gluon, mbarrier, store_wait
from slipstream.kernels.softmax.hopper.common import pair_of_unit, queries_seen, ready
from slipstream.kernels.softmax.hopper.turns import reduce_out, turn_done, turn_of


@gluon.jit
def place_of_keys(unit, sizes):
    """Head of keys, batch row, and first key."""
    heads = sizes[2] // sizes[4]
    tile, pair = pair_of_unit(unit, sizes[5], heads * sizes[3], sizes[7])
    return pair % heads, pair // heads, tile * 128


@gluon.jit
def _add(parity: gl.constexpr, desc_dq, turns_ptr, buffers, full, empty, sizes, window,
         BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Writes or adds every second tile of dq once all earlier keys' are there."""
    T, S, H, group, units = sizes[0], sizes[1], sizes[2], sizes[4], sizes[8]
    turn = units * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        i_kv, i_b, row = place_of_keys(unit, sizes)
        low, count, _, _ = queries_seen(row, T, S, window, BM, 128, FLAGS)
        place = row // 128
        for i_g in range(group):
            first = (i_b * H + i_kv * group + i_g) * gl.cdiv(T, BM) + low // BM
            for i in range(count):
                if turn % 2 == parity:
                    tile = first + count - 1 - i
                    while turn_of(turns_ptr + tile) < place:
                        pass
                    ready(full, turn, 2)
                    for c in gl.static_range(2):
                        to = [tile * BM, c * (D // 2)]
                        if place == 0:
                            copy_out(desc_dq, to, buffers.index(2 * parity + c))
                        else:
                            reduce_out(desc_dq, to, buffers.index(2 * parity + c))
                    store_wait(0)
                    mbarrier.arrive(empty.index(parity))
                    turn_done(turns_ptr + tile, place + 1)
                turn += 1


@gluon.jit
def add_even(desc_dq, turns_ptr, buffers, full, empty, sizes, window, BM: gl.constexpr,
             D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(0, desc_dq, turns_ptr, buffers, full, empty, sizes, window, BM, D, FLAGS)


@gluon.jit
def add_odd(desc_dq, turns_ptr, buffers, full, empty, sizes, window, BM: gl.constexpr,
            D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(1, desc_dq, turns_ptr, buffers, full, empty, sizes, window, BM, D, FLAGS)

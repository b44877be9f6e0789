"""Which unit of work a program takes next: the one `programs` on, or the first nobody has taken.

Units of a mask or of mixed lengths differ in work, so that a program that takes every so manieth is
done long before another. Taken in order as programs become free, the longest first, they all end
within a unit's time. A counter tells how many are taken; the warp that loads asks it, once it has
issued the loads of a unit, and tells the warpgroups that compute by a ring of two words. No result
depends on who takes what.

    board = counter, words, told, heard
"""

from slipstream.kernels.attention.sm90.common import barriers, wait_empty, wait_full
from slipstream.kernels.primitives.gluon_compat import gl, gluon, mbarrier

WORDS = gl.constexpr(2)
# beside common.py's flags
DYNAMIC = gl.constexpr(128)


@gluon.jit
def program_id_volatile(number):
    """The program's number, read where it is wanted: a compiler reads gl.program_id once for all
    warps, and keeps it. Any number will do as an operand, which an instruction has to have."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def alloc_scheduler(LISTENERS: gl.constexpr, FLAGS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [WORDS, 1], layout)
    told = words
    heard = words
    if FLAGS & DYNAMIC:
        told = barriers(WORDS, 1)
        heard = barriers(WORDS, LISTENERS)
    return words, told, heard


@gluon.jit
def fetch_next_tile(unit, board, turn, FLAGS: gl.constexpr):
    """The unit after this one, for the warp that loads."""
    if FLAGS & DYNAMIC:
        counter_ptr, words, told, heard = board
        unit = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        wait_empty(heard, turn, WORDS)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        words.index(turn % WORDS).store(gl.full([1], unit, gl.int32, layout))
        mbarrier.arrive(told.index(turn % WORDS))
    else:
        unit += gl.num_programs(0)
    return unit


@gluon.jit
def receive_next_tile(unit, board, turn, FLAGS: gl.constexpr):
    """The unit after this one, for a warpgroup that computes."""
    if FLAGS & DYNAMIC:
        _, words, told, heard = board
        wait_full(told, turn, WORDS)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        unit = gl.max(words.index(turn % WORDS).load(layout), 0)
        mbarrier.arrive(heard.index(turn % WORDS))
    else:
        unit += gl.num_programs(0)
    return unit

"""Tile scheduler: which unit of work a program takes next.

Static: the unit `num_programs` on. Dynamic (flag DYNAMIC): the first that is not taken yet, by a
counter in global memory. Under a mask or with sequences of mixed lengths units differ in work, and
a static program may end long before another; taken in order, the longest first, all programs end
within one unit's time. No result depends on who takes what.

    producer warp                             each warpgroup
      fetch_next_tile                           receive_next_tile
        atomic_add on the counter                 wait full
        wait empty                                read the number
        store to next_units, arrive full -->      arrive empty
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90.common import barriers, wait_empty, wait_full
from slipstream.kernels.primitives.gluon_compat import gl, gluon, mbarrier

# the next tile is fetched while one is computed
SCHEDULER_STAGES = gl.constexpr(2)
# a flag beside those of common.py
DYNAMIC = gl.constexpr(128)


class Scheduler(NamedTuple):
    """next_units: a ring in shared memory, with its barriers `full` and `empty`."""

    counter_ptr: Any  # how many units are taken, in global memory
    next_units: Any
    full: Any
    empty: Any


@gluon.jit
def program_id_volatile(number):
    """The program's number, read where it is needed: gl.program_id is read once for all warps and
    kept in a register. The operand is unused; an asm instruction has to have one."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def alloc_scheduler(CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    next_units = gl.allocate_shared_memory(gl.int32, [SCHEDULER_STAGES, 1], layout)
    # placeholders without DYNAMIC: the tuple has the same types
    full = next_units
    empty = next_units
    if FLAGS & DYNAMIC:
        full = barriers(SCHEDULER_STAGES, 1)
        empty = barriers(SCHEDULER_STAGES, CONSUMERS)
    return next_units, full, empty


@gluon.jit
def fetch_next_tile(unit, scheduler, i_step, FLAGS: gl.constexpr):
    """The unit after this one, for the producer; i_step: units taken so far."""
    if FLAGS & DYNAMIC:
        unit = gl.atomic_add(scheduler.counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        wait_empty(scheduler.empty, i_step, SCHEDULER_STAGES)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        scheduler.next_units.index(i_step % SCHEDULER_STAGES).store(
            gl.full([1], unit, gl.int32, layout)
        )
        mbarrier.arrive(scheduler.full.index(i_step % SCHEDULER_STAGES))
    else:
        unit += gl.num_programs(0)
    return unit


@gluon.jit
def receive_next_tile(unit, scheduler, i_step, FLAGS: gl.constexpr):
    """The unit after this one, for a consumer; i_step: units taken so far."""
    if FLAGS & DYNAMIC:
        wait_full(scheduler.full, i_step, SCHEDULER_STAGES)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        unit = gl.max(scheduler.next_units.index(i_step % SCHEDULER_STAGES).load(layout), 0)
        mbarrier.arrive(scheduler.empty.index(i_step % SCHEDULER_STAGES))
    else:
        unit += gl.num_programs(0)
    return unit

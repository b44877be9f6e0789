# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""One kernel for the scan, forward and backward, over tokens or over segments of them.

    y_r = a_r y_{r-1} + x_r                                      r = 0 .. rows - 1 of a sequence

Forward, row r is token r, x is x, a is exp(g) and y is h. Backward, row r is the r-th token from
the end, x is dh, y is D, the whole gradient of h, and a_r is the decay of the token after it:

    D_t = dh_t + a_{t+1} D_{t+1}        dx_t = D_t        dg_t = D_t a_t h_{t-1}

with the final state's gradient for D before row 0, where a is 1, and a_0 D_0 for the initial's.

A tile is RUNS runs of RUN rows. A run is a scan of maps y -> a y + x in the registers of a thread,
runs are scanned across threads by what they make as a whole, and all of it then takes in what comes
before the tile. Tiles are loaded in advance, so that one program keeps a multiprocessor's share of
the memory busy. A sequence is one walk over its tiles and reads everything once; or, where that
leaves most of a device idle, segments of L tokens: `ends` makes of each the sum of its log decays
and its y from a zero start, the kernel over those as rows makes the y after each, and then every
segment walks.
"""

import triton
import triton.language as tl


@triton.jit
def _then(a, x, b, y):
    """y -> a y + x, and after it y -> b y + y."""
    return a * b, b * x + y


@triton.jit
def _then_also_before(a, x, pa, px, b, y, pb, py):
    """The same, and the map of all that is before the last."""
    return a * b, b * x + y, a * pb, pb * x + py


@triton.jit
def _rows(r, RUN: tl.constexpr, RUNS: tl.constexpr):
    """Rows of the tile from row r on, [RUNS, RUN, 1]: threads go along the first of these."""
    return r + RUN * tl.arange(0, RUNS)[:, None, None] + tl.arange(0, RUN)[None, :, None]


@triton.jit
def _sequence(cu_ptr, i_n, T, UNIT: tl.constexpr):
    """First row and number of rows of sequence n; rows are tokens, or segments of UNIT of them.

    Packed, the segments of sequence n have the slots from cu[n] // UNIT + n on: never more than
    there are up to the next sequence's.
    """
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        rows = tl.cdiv(tl.maximum(end - begin, 0), UNIT).to(tl.int32)
        if UNIT > 1:
            begin = begin // UNIT + i_n
    else:
        rows = tl.cdiv(T, UNIT)
        begin = i_n.to(tl.int64) * rows
    return begin, rows


@triton.jit
def _segment(cu_ptr, slot, T, N, L: tl.constexpr):
    """The sequence of a slot, and which of its segments it is."""
    if cu_ptr is not None:
        i_n = 0
        past = N
        while past - i_n > 1:
            middle = (i_n + past) // 2
            before = tl.load(cu_ptr + middle).to(tl.int64) // L + middle <= slot
            i_n = tl.where(before, middle, i_n)
            past = tl.where(before, past, middle)
        segment = slot - (tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0) // L + i_n)
    else:
        segments = tl.cdiv(T, L)
        i_n = slot // segments
        segment = slot - i_n * segments
    return i_n, segment.to(tl.int32)


@triton.jit
def _tile(x_ptr, g_ptr, begin, rows, o_r, stop, o_d, D: tl.constexpr, REVERSE: tl.constexpr):
    """Token, log decay and input of each row; those past `stop` leave y alone."""
    o_t = begin + (rows - 1 - o_r if REVERSE else o_r)
    m = (o_r < stop) & (o_d < D)[None, None, :]
    p = o_t * D + o_d[None, None, :]
    b_x = tl.load(x_ptr + p, mask=m, other=0.0).to(tl.float32)
    if REVERSE:
        b_g = tl.load(g_ptr + p + D, mask=m & (o_r > 0), other=0.0).to(tl.float32)
    else:
        b_g = tl.load(g_ptr + p, mask=m, other=0.0).to(tl.float32)
    return p, m, b_g, b_x


@triton.jit
def _advance(b_g, b_x, b_y, RUN: tl.constexpr, RUNS: tl.constexpr):
    """y of each row of a tile, and of its last, from that before the tile."""
    b_a, b_h = tl.associative_scan((tl.exp(b_g), b_x), 1, _then)
    last = (tl.arange(0, RUN) == RUN - 1)[None, :, None]
    b_al = tl.sum(tl.where(last, b_a, 0.0), 1)  # [RUNS, BD]
    b_hl = tl.sum(tl.where(last, b_h, 0.0), 1)
    b_pa, b_ph = tl.full(b_al.shape, 1.0, tl.float32), tl.zeros_like(b_hl)
    both = (b_al, b_hl, b_pa, b_ph)
    b_al, b_hl, b_pa, b_ph = tl.associative_scan(both, 0, _then_also_before)
    b_h += b_a * (b_pa * b_y[None, :] + b_ph)[:, None, :]
    b_hl += b_al * b_y[None, :]
    last = (tl.arange(0, RUNS) == RUNS - 1)[:, None]
    return b_h, tl.sum(tl.where(last, b_hl, 0.0), 0)


@triton.jit(do_not_specialize=["T", "N"])
def scan_ends_kernel(
    x_ptr,  # [tokens, D]; so is g
    g_ptr,
    sum_ptr,  # [slots, D]: of the log decays of each segment
    end_ptr,  # [slots, D]: y after it from a zero start
    cu_ptr,  # [N + 1]
    T,
    N,
    D: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    STAGES: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """grid (ceil(D / BD) * slots,)"""
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    slot = (pid // ND).to(tl.int64)
    i_n, segment = _segment(cu_ptr, slot, T, N, L)
    begin, rows = _sequence(cu_ptr, i_n, T, 1)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    b_y = tl.zeros((BD,), tl.float32)
    b_sum = tl.zeros((BD,), tl.float32)
    stop = tl.minimum(rows, (segment + 1) * L)
    for r in tl.range(tl.maximum(segment, 0) * L, stop, RUN * RUNS, num_stages=STAGES):
        o_r = _rows(r, RUN, RUNS)
        _, _, b_g, b_x = _tile(x_ptr, g_ptr, begin, rows, o_r, stop, o_d, D, REVERSE)
        b_sum += tl.sum(tl.sum(b_g, 0), 0)
        _, b_y = _advance(b_g, b_x, b_y, RUN, RUNS)
    tl.store(sum_ptr + slot * D + o_d, b_sum, mask=o_d < D)
    tl.store(end_ptr + slot * D + o_d, b_y, mask=o_d < D)


@triton.jit(do_not_specialize=["T", "N"])
def scan_walk_kernel(
    x_ptr,  # [rows, D]; so are g, y, h, dg
    g_ptr,
    y_ptr,
    s_in_ptr,  # [N, D]: y before the first row
    s_out_ptr,  # [N, D]: after the last, and backward through the first token's decay
    after_ptr,  # [slots, D]: y after each segment; a program then takes one, else a sequence
    h_ptr,  # backward: the scan's result
    initial_ptr,  # [N, D]: and its state before the first token
    dg_ptr,
    cu_ptr,  # [N + 1]
    T,
    N,
    D: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    STAGES: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    UNIT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """grid (ceil(D / BD) * slots or N,)"""
    ND: tl.constexpr = (D + BD - 1) // BD
    # from the end, what `ends` read last being in cache still
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    slot = (pid // ND).to(tl.int64)
    i_n = slot
    if after_ptr is not None:
        i_n, segment = _segment(cu_ptr, slot, T, N, L)
    begin, rows = _sequence(cu_ptr, i_n, T, UNIT)
    o_n = i_n.to(tl.int64) * D + o_d
    b_y = tl.zeros((BD,), tl.float32)
    if s_in_ptr is not None:
        b_y += tl.load(s_in_ptr + o_n, mask=m_d, other=0.0).to(tl.float32)
    start = 0
    stop = rows
    if after_ptr is not None:
        start = tl.maximum(segment, 0) * L
        stop = tl.minimum(rows, (segment + 1) * L)
        if segment > 0:
            b_y = tl.load(after_ptr + (slot - 1) * D + o_d, mask=m_d, other=0.0)
    for r in tl.range(start, stop, RUN * RUNS, num_stages=STAGES):
        o_r = _rows(r, RUN, RUNS)
        p, m, b_g, b_x = _tile(x_ptr, g_ptr, begin, rows, o_r, stop, o_d, D, REVERSE)
        b_h, b_y = _advance(b_g, b_x, b_y, RUN, RUNS)
        tl.store(y_ptr + p, b_h.to(y_ptr.dtype.element_ty), mask=m)
        if dg_ptr is not None:
            first = o_r == rows - 1
            b_before = tl.load(h_ptr + p - D, mask=m & (~first), other=0.0).to(tl.float32)
            if initial_ptr is not None:
                b_0 = tl.load(initial_ptr + o_n, mask=m_d, other=0.0).to(tl.float32)
                b_before = tl.where(first, b_0[None, None, :], b_before)
            b_dg = b_h * b_before * tl.exp(tl.load(g_ptr + p, mask=m, other=0.0).to(tl.float32))
            tl.store(dg_ptr + p, b_dg.to(dg_ptr.dtype.element_ty), mask=m)
    if s_out_ptr is not None:
        if REVERSE:  # a sequence without tokens has no decay
            b_g = tl.load(g_ptr + begin * D + o_d, mask=m_d & (rows > 0), other=0.0)
            b_y *= tl.exp(b_g.to(tl.float32))
        # of the program that came to the last row
        m_s = m_d
        if after_ptr is not None:
            m_s = m_d & (segment == tl.maximum(tl.cdiv(rows, L) - 1, 0))
        tl.store(s_out_ptr + o_n, b_y.to(s_out_ptr.dtype.element_ty), mask=m_s)

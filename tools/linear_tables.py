"""Tables of linear attention beside fla and FlashQLA, of docs/performance.md."""

from table_cells import (
    Cell,
    Row,
    Table,
    card_and_day,
    error,
    is_number,
    label,
    matching,
    number,
    pair,
    ratio,
    read,
)

LINEAR = (  # operator, shape
    ("linear_attn", "A"),
    ("linear_attn", "C"),
    ("retention", "A"),
    ("retention", "C"),
    ("lightning_attn", "A"),
    ("simple_gla", "A"),
    ("gla", "A"),
    ("gla", "C"),
    ("rwkv6", "A"),
    ("gsa", "A"),
    ("hgrn", "A"),
    ("delta_rule", "A"),
    ("gated_delta_rule", "Q1"),
    ("gated_delta_rule", "Q2"),
    ("gated_delta_product", "P"),
    ("comba", "A"),
    ("kda", "A"),
    ("iplr_delta_rule", "A"),
    ("dplr_delta_rule", "A"),
    ("rwkv7", "A"),
)
MORE = (
    "gdn2",
    "gated_oja_rule",
    "precond_gated_delta_rule",
    "precond_kda",
    "lightnet",
    "mamba3",
    "rwkv4",
)
INPUTS_LEFT_OUT = "2026-11-25"  # of peak_GiB, from that day on
FULLY_TUNED_S = 100.0  # fla's autotuner tries all of its configurations; fewer took up to 20 s


def linear_row(operator: str, shape: str) -> Row:
    """The newest beside fla tuned in full, else beside fla, else of all."""
    found = matching("linear_gpu_peers", operator=operator, shape=shape)
    tuned = [x for x in found if tuning(x) == "full"]
    peers = [x for x in found if is_number(x.get("fla fwd"))]
    return (tuned or peers or found)[-1]


def tuning(row: Row) -> str:
    """How many configurations fla's autotuner tried in that run; older rows do not say so, but a
    first call that tried all of them took long."""
    if not is_number(row.get("fla fwd")) or row.get("fla tuned"):
        return row.get("fla tuned")
    first = row.get("fla first_s")
    return "few" if is_number(first) and float(first) < FULLY_TUNED_S else "full"


def peak(row: Row, column: str) -> Cell:
    """Empty in older rows, which counted the inputs too."""
    return number(row, column) if row.get("date") >= INPUTS_LEFT_OUT else Cell("")


def linear() -> Table:
    rows, used = [], []
    for operator, shape in LINEAR:
        row = linear_row(operator, shape)
        used.append(row)
        ours = number(row, "fwd"), number(row, "both")
        theirs = number(row, "fla fwd"), number(row, "fla both")
        rows.append(
            (
                label(f"{operator} {shape}"),
                pair(*ours),
                pair(*theirs),
                label(tuning(row)),
                pair(ratio(theirs[0], ours[0]), ratio(theirs[1], ours[1])),
                peak(row, "peak_GiB"),
                peak(row, "fla peak_GiB"),
                card_and_day(row),
            )
        )
    headings = (
        "operator", "ms", "fla, ms", "fla's tuning", "fla / ours", "GiB", "fla, GiB", "measured",
    )  # fmt: skip
    return Table("linear", "bench/linear.py", headings, tuple(rows), tuple(used))


def linear_errors() -> Table:
    used = [linear_row(*x) for x in LINEAR]
    rows = tuple(
        (
            label(f"{row.get('operator')} {row.get('shape')}"),
            *(error(row, f"{x} error") for x in ("out", "grad", "gate", "fla")),
        )
        for row in used
    )
    headings = ("operator", "outputs", "gradients", "gradients of gates and beta", "fla's largest")
    return Table("linear_errors", "bench/linear.py", headings, rows, tuple(used))


def linear_more() -> Table:
    """Operators without a peer's figures, of which some have been measured."""
    found = [matching("linear_gpu_peers", operator=x, shape="A") for x in MORE]
    used = [x[-1] for x in found if x]
    rows = tuple(
        (
            label(f"{row.get('operator')} {row.get('shape')}"),
            pair(number(row, "fwd"), number(row, "both")),
            number(row, "peak_GiB"),
            *(error(row, f"{x} error") for x in ("out", "grad", "gate")),
        )
        for row in used
    )
    headings = ("operator", "ms", "GiB", "outputs", "gradients", "gradients of gates and beta")
    return Table("linear_more", "bench/linear.py --peer none", headings, rows, tuple(used))


def flash_qla_rows() -> list[Row]:
    """The newest row of each shape."""
    shapes = {x.get("shape"): x for x in read("delta_peers") if is_number(x.get("flash_qla_ms"))}
    return [x for x in shapes.values() if x.get("flash_qla_kernels_ms")]


def kernels(row: Row, column: str) -> tuple[Cell, Cell]:
    """The numbers of "0.3102 1.1812": forward, with backward."""
    parts = [Row(row.file, row.line, {column: x}) for x in row.get(column).split()]
    return number(parts[0], column), number(parts[1], column)


def flash_qla() -> Table:
    rows, used = [], flash_qla_rows()
    for row in used:
        ours = number(row, "slipstream_ms"), number(row, "slipstream_both_ms")
        theirs = number(row, "flash_qla_ms"), number(row, "flash_qla_both_ms")
        our_kernels = kernels(row, "slipstream_kernels_ms")
        their_kernels = kernels(row, "flash_qla_kernels_ms")
        rows.append(
            (
                label(row.get("shape")),
                pair(*ours),
                pair(*theirs),
                pair(ratio(theirs[0], ours[0]), ratio(theirs[1], ours[1])),
                pair(*our_kernels),
                pair(*their_kernels),
                number(row, "slipstream_peak_mib", digits=4),
                number(row, "flash_qla_peak_mib", digits=4),
                error(row, "flash_qla_off"),
            )
        )
    headings = (
        "shape", "ms", "FlashQLA, ms", "FlashQLA / ours", "kernels, ms", "FlashQLA's, ms", "MiB",
        "FlashQLA, MiB", "largest difference",
    )  # fmt: skip
    return Table(
        "flash_qla", "bench/linear.py --peer flash_qla", headings, tuple(rows), tuple(used)
    )


WEAK, STRENGTHS = "[-0.1,0]", ("[-5,0]", "-5", "[-9,0]", "[-20,0]")


def strong_gates() -> Table:
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("strong_gates"):
        key = tuple(row.get(x) for x in ("operator", "gates", "kernels", "shape"))
        found.setdefault(key, {})[row.get("strength")] = row
    rows = []
    for (operator, gates, kernels_of, shape), of in found.items():
        ms = {x: [number(row, y, digits=4) for y in ("fwd", "both")] for x, row in of.items()}
        weak = ms.pop(WEAK)
        ratios = (pair(*(ratio(x, y) for x, y in zip(ms[z], weak))) for z in STRENGTHS)
        named = label(f"{operator}, {shape}"), label(gates), label(kernels_of)
        rows.append((*named, pair(*weak), *ratios))
    headings = ("operator, B x T x H", "gates", "kernels", f"{WEAK}, ms", *STRENGTHS)
    return Table("strong_gates", "", headings, tuple(rows), read("strong_gates"))

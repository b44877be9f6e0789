"""The tables of docs/guides/context-parallel.md, out of bench/results/context_parallel.csv.

What more GPUs take is forecast from what one and two have taken, with as many tokens on each:

    t(R) = t(1) + x + n (R - 2) (m / b + c)

x = t(2) - t(1) is what two GPUs take beyond one; n is 1 forward and 2 with backward; m the bytes
that each further rank sends the last one, E and M; b the bytes a second between two GPUs; c what
combining one more of them takes. b and c are not measured here: ASSUMED, MICROSECONDS.

A GPU's share of causal attention of R times as many tokens is R times the work, so one GPU with all
tokens is what several are beside; what each exchanges goes to R - 1 of R:

    t(R) = R T / 4 + x' 2 (R - 1) / R b(2) / b(R)          x' = t(2) - T / 2, T of one with two's
"""

from table_cells import Cell, Row, Table, label, matching, number, ratio

FILE = "context_parallel"
GPUS = (4, 8, 64)
SEGMENT = "8192"  # tokens, of the deterministic mode
# GB/s that a GPU receives: NVLink between those of one host, and the network between hosts
ASSUMED = {4: 200, 8: 200, 64: 25}
MICROSECONDS = 10
# a head's M, in units of float32, by the operator's name: else K K
FACTORS = {"chunk_simple_gla": lambda k: 1, "chunk_gla-narrow": lambda k: k}


def settings() -> list[tuple[str, str, str, str]]:
    """Operator, heads, gate and tokens of a GPU, of every row of two GPUs that is not of the
    deterministic mode; the first of each."""
    rows = matching(FILE, gpus="2", segments="")
    found = [
        (x.get("operator"), x.get("heads"), x.get("gate"), str(int(x.get("tokens")) // 2))
        for x in rows
    ]
    return list(dict.fromkeys(found))


def one_and_two(operator: str, heads: str, gate: str, tokens: int, each: bool) -> tuple[Row, Row]:
    """The newest row of two GPUs, and that of one from the same run: with all tokens, or with as
    many as each of them has."""
    named = {"operator": operator, "heads": heads, "gate": gate, "segments": ""}
    two = matching(FILE, gpus="2", tokens=str(2 * tokens), **named)[-1]
    of_one = matching(FILE, gpus="1", tokens=str(tokens if each else 2 * tokens), **named)
    return [x for x in of_one if x.line < two.line][-1], two


def context_parallel() -> Table:
    rows, used = [], []
    for operator, heads, gate, tokens in settings():
        one, two = one_and_two(operator, heads, gate, int(tokens), False)
        used += [one, two]
        line = [label(operator), label(heads), label(gate), label(f"{int(tokens):,}")]
        for column in ("fwd", "both"):
            times = number(one, column), number(two, column)
            line += [*times, ratio(*times)]
        for column in ("fwd_GiB", "both_GiB"):
            known = one.get(column) and two.get(column)
            line.append(ratio(number(two, column), number(one, column)) if known else label("-"))
        rows.append(tuple(line))
    headings = (
        "operator", "heads", "gate", "tokens a GPU", "one GPU, ms", "two", "x", "with backward, ms",
        "two", "x", "memory of a GPU, two / one", "with backward",
    )  # fmt: skip
    script = "bench/context_parallel.py"
    return Table("context_parallel", script, headings, tuple(rows), tuple(used))


def takes_all(operator: str) -> bool:
    """Whether several GPUs are beside one with the tokens of all."""
    return operator == "attention"


def share(one: Row, many: Row, column: str) -> float:
    """The share of one GPU's speed that each of many has."""
    work = int(many.get("gpus")) if takes_all(many.get("operator")) else 1
    return float(one.get(column)) / work / float(many.get(column))


def forecast(one: Row, two: Row, column: str, gpus: int) -> float:
    """The same of so many GPUs, from one and two."""
    operator, heads = two.get("operator"), int(two.get("heads"))
    alone, together, each = float(one.get(column)), float(two.get(column)), 0.0
    if takes_all(operator):
        exchanges = 2 * (gpus - 1) / gpus * ASSUMED[4] / ASSUMED.get(gpus, ASSUMED[4])
        return 1 / (1 + exchanges * (together - alone / 2) / (gpus * alone / 4))
    if gpus > 2:
        width = 64 if "rwkv7" in operator else 128
        entries = width + FACTORS.get(operator, lambda k: k * k)(width) / width
        sent = 4 * heads * width * entries
        each = 1e3 * sent / (1e9 * ASSUMED[gpus]) + 1e-3 * MICROSECONDS
    count = 1 if column == "fwd" else 2
    return alone / (together + count * (gpus - 2) * each)


def measured(
    operator: str, heads: str, gate: str, tokens: str, gpus: str, segments: str = ""
) -> tuple[Row, Row] | None:
    """The newest row of so many GPUs with as many tokens on each, and that of one from its run."""
    named = {"operator": operator, "heads": heads, "gate": gate}
    total = str(int(gpus) * int(tokens))
    found = matching(FILE, gpus=gpus, tokens=total, segments=segments, **named)
    if not found:
        return None
    of_one = matching(FILE, gpus="1", tokens=total if takes_all(operator) else tokens, **named)
    alone = [x for x in of_one if x.line < found[-1].line]
    return alone[-1], found[-1]


def _share(pair: tuple[Row, Row], column: str) -> Cell:
    sources = number(pair[0], column).sources + number(pair[1], column).sources
    return Cell(f"{share(*pair, column):.2f}", sources)


def context_forecast() -> Table:
    rows, used = [], []
    for operator, heads, gate, tokens in settings():
        one, two = one_and_two(operator, heads, gate, int(tokens), not takes_all(operator))
        four = measured(operator, heads, gate, tokens, "4")
        used += [one, two, *(four or ())]
        line = [label(operator), label(heads), label(gate), label(f"{int(tokens):,}")]
        for column in ("fwd", "both"):
            line.append(_share((one, two), column))
            line.append(label("-") if four is None else _share(four, column))
            sources = line[-2].sources
            line += [Cell(f"{forecast(one, two, column, n):.2f}", sources) for n in GPUS]
        rows.append(tuple(line))
    shown = ("2 GPUs", "4", *(f"{n} by the model" for n in GPUS))
    headings = (
        "operator", "heads", "gate", "tokens a GPU", *(f"forward, {x}" for x in shown),
        *(f"with backward, {x}" for x in shown),
    )  # fmt: skip
    script = "bench/context_parallel.py"
    return Table("context_forecast", script, headings, tuple(rows), tuple(used))


def context_in_order() -> Table:
    """The deterministic mode; shares are of the speed of one GPU with as many tokens (of attention,
    with all)."""
    rows, used = [], []
    found = [(x.get("operator"), x.get("heads"), x.get("gpus")) for x in in_segments()]
    for operator, heads, gpus in dict.fromkeys(found):
        named = operator, heads, "weak", "65536", gpus
        with_mode, without = measured(*named, SEGMENT), measured(*named)
        if with_mode is None or without is None:
            continue
        used += [*with_mode, *without]
        line = [label(operator), label(heads), label(gpus)]
        for column in ("fwd", "both"):
            one, many = (number(x, column) for x in with_mode)
            line += [one, many, _share(with_mode, column), _share(without, column)]
        rows.append(tuple(line))
    parts = ("one GPU, ms", "all, ms", "share", "without the mode")
    headings = ("operator", "heads", "GPUs", *parts, *(f"with backward, {x}" for x in parts))
    script = "bench/context_parallel.py --segments 8192"
    return Table("context_in_order", script, headings, tuple(rows), tuple(used))


def in_segments() -> list[Row]:
    """Rows of several GPUs in the deterministic mode."""
    return [x for x in matching(FILE, segments=SEGMENT) if x.get("gpus") != "1"]


def parallel_training() -> Table:
    """Whole steps, and a layer of a million tokens; a row for each number of GPUs, beside one GPU
    of the same run."""
    names = {
        "fsdp2": "a model of 0.35 B, FSDP2, 32,768 tokens a GPU",
        "context": "the same, one sequence of 262,144 tokens, checkpointed",
        "million": "a gated_deltanet layer, 1,048,576 tokens, checkpointed",
    }
    rows, used = [], []
    for case, name in names.items():
        alone = matching("parallel_training", case=case, gpus="1")
        for gpus in ("2", "4"):
            found = matching("parallel_training", case=case, gpus=gpus)
            if not found:
                continue
            many = found[-1]
            one = next((x for x in reversed(alone) if x.line < many.line), None)
            used += [many] if one is None else [one, many]
            line: list[Cell] = [label(name), label(gpus)]
            line.append(label("-") if one is None else number(one, "ms"))
            line.append(number(many, "ms"))
            speeds = None if one is None else (number(many, "tokens/s"), number(one, "tokens/s"))
            line.append(label("-") if speeds is None else ratio(*speeds))
            line.append(number(many, "peak_GiB"))
            rows.append(tuple(line))
    headings = ("step", "GPUs", "one GPU, ms", "all, ms", "tokens/s, x", "GiB a GPU of all")
    script = "bench/parallel_training.py"
    return Table("parallel_training", script, headings, tuple(rows), tuple(used))


SCALING = (context_parallel, context_forecast, context_in_order, parallel_training)

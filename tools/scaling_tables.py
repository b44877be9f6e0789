"""The tables of docs/guides/context-parallel.md, out of bench/results/context_parallel.csv.

What more GPUs take is forecast from what one and two have taken, with as many tokens on each:

    t(R) = t(1) + x + n (R - 2) (m / b + c)

x = t(2) - t(1) is what two GPUs take beyond one; n is 1 forward and 2 with backward; m the bytes
that each further rank sends the last one, E and M; b the bytes a second between two GPUs; c what
combining one more of them takes. b and c are not measured here: ASSUMED, MICROSECONDS.
"""

from table_cells import Cell, Row, Table, label, matching, number, ratio

FILE = "context_parallel"
GPUS = (4, 8, 64)
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


def context_forecast() -> Table:
    rows, used = [], []
    for operator, heads, gate, tokens in settings():
        if operator == "attention":  # each rank's work grows with the number of ranks
            continue
        one, two = one_and_two(operator, heads, gate, int(tokens), True)
        used += [one, two]
        line = [label(operator), label(heads), label(gate), label(f"{int(tokens):,}")]
        for column in ("fwd", "both"):
            alone, together = float(one.get(column)), float(two.get(column))
            sources = number(one, column).sources + number(two, column).sources
            for gpus in (2, *GPUS):
                each = 0.0
                if gpus > 2:
                    width = 64 if "rwkv7" in operator else 128
                    entries = width + FACTORS.get(operator, lambda k: k * k)(width) / width
                    sent = 4 * int(heads) * width * entries
                    each = 1e3 * sent / (1e9 * ASSUMED[gpus]) + 1e-3 * MICROSECONDS
                count = 1 if column == "fwd" else 2
                time = together + count * (gpus - 2) * each
                line.append(Cell(f"{alone / time:.2f}", sources))
        rows.append(tuple(line))
    shown = ("2 GPUs", *(f"{n}" for n in GPUS))
    headings = (
        "operator", "heads", "gate", "tokens a GPU", *(f"forward, {x}" for x in shown),
        *(f"with backward, {x}" for x in shown),
    )  # fmt: skip
    script = "bench/context_parallel.py"
    return Table("context_forecast", script, headings, tuple(rows), tuple(used))


def parallel_training() -> Table:
    """Whole steps, and a layer of a million tokens."""
    names = {
        "fsdp2": "a model of 0.35 B, FSDP2, 32,768 tokens a GPU",
        "context": "the same, one sequence of 262,144 tokens, checkpointed",
        "million": "a gated_deltanet layer, 1,048,576 tokens, checkpointed",
    }
    rows, used = [], []
    for case, name in names.items():
        found = {gpus: matching("parallel_training", case=case, gpus=gpus) for gpus in ("1", "2")}
        two = found["2"][-1]
        line: list[Cell] = [label(name)]
        one = found["1"][-1] if found["1"] else None
        used += [two] if one is None else [one, two]
        line.append(label("-") if one is None else number(one, "ms"))
        line.append(number(two, "ms"))
        speeds = None if one is None else (number(two, "tokens/s"), number(one, "tokens/s"))
        line.append(label("-") if speeds is None else ratio(*speeds))
        line.append(number(two, "peak_GiB"))
        rows.append(tuple(line))
    headings = ("step", "one GPU, ms", "two, ms", "tokens/s, x", "GiB a GPU of two")
    script = "bench/parallel_training.py"
    return Table("parallel_training", script, headings, tuple(rows), tuple(used))


SCALING = (context_parallel, context_forecast, parallel_training)

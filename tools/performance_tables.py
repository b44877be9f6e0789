"""The tables of README.md and docs/performance.md, each number with the row that it comes from.

Rows are those of bench/results/*.csv. Where a measurement was repeated the newest row counts, and
a peer is only shown beside a row of the same run. tools/claims.py writes the tables into the pages.
"""

from collections.abc import Callable, Iterable, Sequence

from convergence_table import convergence
from linear_tables import (
    flash_qla,
    flash_qla_rows,
    linear,
    linear_errors,
    linear_more,
    linear_row,
    strong_gates,
)
from peer_suites import is_omitted
from scaling_tables import SCALING
from table_cells import (
    Cell,
    Row,
    Table,
    card_and_day,
    error,
    is_number,
    label,
    largest_error,
    newest,
    number,
    pair,
    ratio,
    read,
    triple,
)


def attention_row(shape: str, causal: str) -> Row:
    return newest("attention_rows", "cudnn fwd", shape=shape, causal=causal)


def attention() -> Table:
    used = {(x.get("shape"), x.get("causal")): x for x in read("attention_rows")}
    rows = []
    for (shape, causal), row in used.items():
        cells = {
            who: (number(row, f"{who} fwd"), number(row, f"{who} bwd"))
            for who in ("sm90", "cudnn", "portable", "flash")
        }
        rows.append(
            (
                label(shape.replace(",", " x ")),
                label("yes" if causal == "True" else "no"),
                *(pair(*x) for x in cells.values()),
                pair(*(ratio(a, b) for a, b in zip(cells["sm90"], cells["cudnn"], strict=True))),
                card_and_day(row),
            )
        )
    headings = (
        "B x T x H x D", "causal", "sm_90 kernels", "cuDNN", "Triton kernels", "torch's flash",
        "sm_90 / cuDNN", "measured",
    )  # fmt: skip
    return Table("attention", "bench/attention.py", headings, tuple(rows), tuple(used.values()))


def packed_attention() -> Table:
    used = {x.get("shape"): x for x in read("attention_packed")}
    rows = [
        (
            label(shape.removeprefix("packed causal, ").replace(", ", " heads of ")),
            pair(number(row, "mixed fwd"), number(row, "mixed bwd")),
            pair(number(row, "equal fwd"), number(row, "equal bwd")),
        )
        for shape, row in used.items()
    ]
    headings = ("heads", "mixed lengths", "equal lengths, the same work")
    script = "bench/attention.py --only packed"
    return Table("packed_attention", script, headings, tuple(rows), tuple(used.values()))


def cache_attention() -> Table:
    used: dict[tuple[str, str, str], Row] = {}
    for name in ("attention_decode_gpu", "attention_latent"):
        used.update({(name, x.get("shape"), x.get("page")): x for x in read(name)})
    rows = [
        (
            label("latent" if name == "attention_latent" else "keys and values"),
            label(shape.replace(",", " x ")),
            label(page if page != "0" else "none"),
            number(row, "ms"),
            number(row, "TB/s"),
            number(row, "of copy", digits=2),
        )
        for (name, shape, page), row in used.items()
    ]
    headings = ("cache", "shape", "page", "ms", "TB/s", "of copy bandwidth")
    script = "bench/attention.py --only cache`, `python bench/attention.py --only latent"
    return Table("cache_attention", script, headings, tuple(rows), tuple(used.values()))


def error_rows(begin: str) -> dict[str, dict[str, Row]]:
    """work, without `begin` -> who -> the newest row of errors."""
    found: dict[str, dict[str, Row]] = {}
    for row in read("errors"):
        if row.get("work").startswith(begin):
            found.setdefault(row.get("work").removeprefix(begin), {})[row.get("who")] = row
    return found


def errors_of(row: Row | None) -> Cell:
    """Errors of the output and of the gradients."""
    return Cell("") if row is None else pair(error(row, "out error"), error(row, "grad error"))


def attention_errors() -> Table:
    found = error_rows("attention ")
    rows = [
        (
            label(work.split()[0].replace(",", " x ")),
            label("yes" if work.endswith("causal") else "no"),
            *(errors_of(who.get(x)) for x in ("sm90", "cudnn", "portable", "flash")),
        )
        for work, who in found.items()
    ]
    headings = (
        "B x T x H x D", "causal", "sm_90 kernels", "cuDNN", "Triton kernels", "torch's flash",
    )  # fmt: skip
    used = tuple(row for who in found.values() for row in who.values())
    script = "bench/attention.py --errors"
    return Table("attention_errors", script, headings, tuple(rows), used)


PROVIDERS = ("ours", "torch", "fla", "liger")


def block_errors() -> Table:
    """Errors of works that a peer did too."""
    works = {x.get("work") for x in read("blocks_gpu")}
    found = {k: x for k, x in error_rows("").items() if k in works and len(x) > 1}
    rows = [
        (label(work), *(errors_of(who.get(x)) for x in PROVIDERS)) for work, who in found.items()
    ]
    used = tuple(row for who in found.values() for row in who.values())
    headings = ("work", "ours", "torch", "fla", "Liger")
    return Table("block_errors", "bench/blocks.py --errors", headings, tuple(rows), used)


def runs_of(name: str, column: str) -> list[list[Row]]:
    """Rows one after another with the same value in a column: one run with its peers."""
    runs: list[list[Row]] = []
    for row in read(name):
        if runs and runs[-1][-1].get(column) == row.get(column):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def block_rows(work: str) -> dict[str, Row]:
    """provider -> row of the newest run that has the most providers."""
    runs = [x for x in runs_of("blocks_gpu", "work") if x[0].get("work") == work]
    by_provider = [{row.get("who"): row for row in run} for run in runs]
    most = max(len(x) for x in by_provider)
    return [x for x in by_provider if len(x) == most][-1]


def times(row: Row | None) -> Cell:
    """Forward and backward, or both together where they were not timed apart."""
    apart = pair(number(row, "fwd_ms"), number(row, "bwd_ms"))
    return apart if apart.text else number(row, "both_ms")


def blocks() -> Table:
    works = dict.fromkeys(x.get("work") for x in read("blocks_gpu"))
    rows: list[tuple[Cell, ...]] = []
    used: list[Row] = []
    for work in works:
        found = block_rows(work)
        used += found.values()
        rows.append(
            (
                label(work),
                *(times(found.get(who)) for who in PROVIDERS),
                *(number(found.get(who), "beyond_gib", digits=2) for who in PROVIDERS),
            )
        )
    names = ("ours", "torch", "fla", "Liger")
    headings = ("work", *(f"{x}, ms" for x in names), *(f"{x}, GiB" for x in names))
    return Table("blocks", "bench/blocks.py", headings, tuple(rows), tuple(used))


def matmul() -> Table:
    """The default kernel of each product, or the fastest where only named ones were timed."""
    latest: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("matmul_gpu"):
        key = tuple(row.get(x) for x in ("shape", "dtype", "layout"))
        latest.setdefault(key, {})[row.get("impl")] = row
    used, rows = [], []
    for key, found in latest.items():
        row = found.get("chosen") or max(found.values(), key=lambda x: float(x.get("tflops")))
        used.append(row)
        ours, theirs = number(row, "tflops", digits=4), number(row, "library", digits=4)
        kernel = {"hopper": "sm90", "chosen": "default"}.get(row.get("impl"), row.get("impl"))
        precision = row.get("precision") if key[1] == "float32" else ""
        what = f"{key[1]} {precision}".strip()
        rows.append((label(key[0]), label(what), label(key[2]), label(kernel), ours, theirs))
        rows[-1] += (ratio(ours, theirs), error(row, "error"))
    headings = (
        "M x N x K", "dtype", "layout", "kernel", "TFLOP/s", "cuBLAS", "ours / cuBLAS", "error",
    )  # fmt: skip
    return Table("matmul", "bench/matmul.py", headings, tuple(rows), tuple(used))


def steps() -> Table:
    used = {
        (x.get("what"), x.get("shape")): x
        for x in read("step_gpu")
        if x.get("what").startswith("step ")
    }
    rows = [
        (
            label(what.removeprefix("step ")),
            label(shape),
            number(row, "ms", 1000),
            number(row, "TB/s"),
            number(row, "of copy", digits=2),
        )
        for (what, shape), row in used.items()
    ]
    headings = ("operator", "shape", "us", "TB/s", "of copy bandwidth")
    return Table("steps", "bench/decode.py", headings, tuple(rows), tuple(used.values()))


HOST_SCALE = "torch's rms_norm"


def host() -> Table:
    """The last two runs that have every operator, each with torch's own rms_norm for a scale."""
    runs: list[dict[str, Row]] = [{}]
    for row in read("host_gpu"):
        runs[-1][row.get("operator")] = row
        if row.get("operator") == HOST_SCALE:
            runs.append({})
    whole = [x for x in runs if HOST_SCALE in x and "chunk_gsa" in x and "rms_norm" in x]
    whole = [x for x in whole if "chunk_rwkv7" in x][-2:]
    rows = [
        (label(name), *(number(run.get(name), "us") for run in whole), number(row, "launches"))
        for name, row in whole[-1].items()
    ]
    rows = [(*x[:3], Cell(x[3].text.partition(".")[0], x[3].sources)) for x in rows]
    headings = ("call", "us, one host", "us, another host", "launches")
    used = tuple(row for run in whole for row in run.values())
    return Table("host", "bench/host.py", headings, tuple(rows), used)


def first_calls() -> Table:
    used = {
        x.get("operator"): x
        for x in read("first_calls")
        if is_number(x.get("warm_s")) and not x.get("note")
    }
    rows = [
        (label(name), number(row, "cold_s"), number(row, "warm_s")) for name, row in used.items()
    ]
    headings = ("operator", "empty cache, s", "filled cache, s")
    script = "bench/first_calls.py"
    return Table("first_calls", script, headings, tuple(rows), tuple(used.values()))


def training() -> Table:
    """Each model's newest row with all activations kept and with checkpoints."""
    used = {(x.get("model"), x.get("who")): x for x in read("training")}
    models = dict.fromkeys(x.removesuffix(" checkpointed") for x, who in used if who == "kept")
    rows = []
    for model in models:
        kept, less = (used[f"{model} checkpointed", x] for x in ("kept", "checkpointed"))
        rows.append(
            (
                label(model),
                *(number(kept, x) for x in ("ms", "peak_gib")),
                *(number(less, x) for x in ("ms", "peak_gib")),
                ratio(number(less, "ms"), number(kept, "ms")),
            )
        )
    headings = (
        "mixer", "ms", "GiB", "checkpointed, ms", "checkpointed, GiB", "checkpointed / kept",
    )  # fmt: skip
    shown = tuple(x for (model, _), x in used.items() if model.endswith(" checkpointed"))
    return Table("training", "bench/training.py --only checkpointed", headings, tuple(rows), shown)


def memory() -> Table:
    used = {x.get("operator"): x for x in read("memory_gpu") if not x.get("shape")}
    rows = [
        (
            label(name),
            number(row, "forward MiB", digits=4),
            number(row, "forward %"),
            number(row, "both MiB", digits=4),
            number(row, "both %"),
        )
        for name, row in used.items()
    ]
    headings = ("operator", "forward, MiB", "percent", "with backward, MiB", "percent")
    return Table("memory", "bench/linear.py --memory", headings, tuple(rows), tuple(used.values()))


def cpu() -> Table:
    used = {x.get("work"): x for x in read("linear_cpu")}
    rows = [
        (
            label(work),
            label(row.get("shape")),
            number(row, "ours_ms"),
            number(row, "transformers_ms"),
            number(row, "ratio", digits=2),
        )
        for work, row in used.items()
    ]
    headings = ("work", "shape", "ms", "transformers, ms", "ours / transformers")
    return Table("cpu", "bench/linear.py --peer cpu", headings, tuple(rows), tuple(used.values()))


def summary() -> Table:
    """README: one line for each kind of operator."""
    rows: list[tuple[Cell, ...]] = []
    used: list[Row] = []

    def line(what: str, row: Row, unit: str, ours: Cell, peer: str, theirs: Cell, *errors: Cell):
        used.append(row)
        card = label(row.get("device").split()[1])
        rows.append((label(what), ours, label(peer), theirs, label(unit), card, *errors))

    def off(work: str, who: str) -> Cell:
        """The largest error of one of errors.csv; empty where there is no row."""
        row = error_rows("").get(work, {}).get(who)
        if row is None:
            return Cell("")
        used.append(row)
        return largest_error(row)

    gdn = next(x for x in flash_qla_rows() if x.get("shape") == "Q1")
    line(
        "gated delta rule, 8192 tokens, 16 heads of q and k, 64 of v",
        gdn,
        "ms",
        pair(number(gdn, "slipstream_ms"), number(gdn, "slipstream_both_ms")),
        "FlashQLA",
        pair(number(gdn, "flash_qla_ms"), number(gdn, "flash_qla_both_ms")),
        off("gated_delta_rule Q1", "ours"),
        off("gated_delta_rule Q1", "flash_qla"),
    )
    for operator in ("gla", "kda", "rwkv7"):
        row = linear_row(operator, "A")
        line(
            f"{operator}, 8192 tokens, 96 heads",
            row,
            "ms",
            pair(number(row, "fwd"), number(row, "both")),
            "fla",
            pair(number(row, "fla fwd"), number(row, "fla both")),
            largest_error(row),
            error(row, "fla error") if row.get("fla error") else off(f"{operator} A", "fla"),
        )
    row = attention_row("4,4096,16,128", "True")
    line(
        "causal attention, 4 x 4096 tokens, 16 heads",
        row,
        "TFLOP/s",
        pair(number(row, "sm90 fwd"), number(row, "sm90 bwd")),
        "cuDNN",
        pair(number(row, "cudnn fwd"), number(row, "cudnn bwd")),
        off("attention 4,4096,16,128 causal", "sm90"),
        off("attention 4,4096,16,128 causal", "cudnn"),
    )
    found = block_rows("cross_entropy 16384x32000")
    line(
        "cross entropy, 16384 x 32000, with backward",
        found["ours"],
        "ms",
        number(found["ours"], "both_ms"),
        "Liger",
        number(found["liger"], "both_ms"),
        off("cross_entropy 16384x32000", "ours"),
        off("cross_entropy 16384x32000", "liger"),
    )
    used.append(found["liger"])
    headings = (
        "", "Slipstream", "peer", "peer's", "unit", "GPU", "largest error", "peer's",
    )  # fmt: skip
    return Table("summary", "", headings, tuple(rows), tuple(used))


def transformers_models() -> Table:
    """Models of transformers as they are, with fla, and patched."""
    ways, columns = ("torch", "fla", "patched"), ("train ms", "B1 tokens/s", "B16 tokens/s")
    used: dict[tuple[str, str], dict[str, Row]] = {}
    for x in read("transformers_models"):
        if "host shared" not in x.get("note"):  # their steps are bound by the host
            used.setdefault((x.get("device"), x.get("model")), {})[x.get("way")] = x
    rows = []
    for (device, model), of in used.items():
        cells = [[number(of.get(way), column, digits=4) for way in ways] for column in columns]
        where = "CPU, four layers" if "CPU" in device else device.split()[1]
        faster = ratio(cells[0][0], cells[0][2])
        rows.append((label(f"{model}, {where}"), *(triple(*x) for x in cells), faster))
    headings = (
        "torch / fla / patched", "ms a step", "tokens/s, one row", "tokens/s, 16 rows",
        "step, torch / patched",
    )  # fmt: skip
    shown = tuple(x for of in used.values() for x in of.values())
    return Table(
        "transformers_models", "bench/transformers_models.py", headings, tuple(rows), shown
    )


def peer_suites() -> Table:
    """The counts of tools/peer_suites.py, a row for each file of which a case ran."""
    counts = ("passed", "failed", "skipped")
    last: dict[tuple[str, str, str], Row] = {}
    for x in read("peer_suites"):
        ran = int(x.get("passed")) or int(x.get("failed"))
        # without either it ran out of time, or every case was skipped
        if ran or x.get("skipped") == x.get("cases"):
            last[x.get("package"), x.get("file"), x.get("device")] = x
    used = {
        of: x
        for of, x in last.items()
        if (int(x.get("passed")) or int(x.get("failed"))) and not is_omitted(*of[:2])
    }
    rows = [
        (label(package), label(f"`{file}`"), label(device), *(number(x, y) for y in counts))
        for (package, file, device), x in used.items()
    ]
    shown = tuple(used.values())
    headings = ("package", "file", "device", *counts)
    return Table("peer_suites", "tools/peer_suites.py", headings, tuple(rows), shown)


TABLES: Sequence[Callable[[], Table]] = (
    summary, linear, linear_errors, linear_more, strong_gates, flash_qla, attention,
    attention_errors, packed_attention, cache_attention, blocks, block_errors, matmul, steps, host,
    first_calls, memory, training, convergence, transformers_models, peer_suites, cpu,
)  # fmt: skip


def tables() -> dict[str, Table]:
    return {x.name: x for x in (make() for make in (*TABLES, *SCALING))}


def claims(found: Iterable[Table]) -> list[tuple[str, str, Cell]]:
    """(table, row, cell) of every number."""
    return [
        (table.name, row[0].text, cell)
        for table in found
        for row in table.rows
        for cell in row
        if cell.sources
    ]

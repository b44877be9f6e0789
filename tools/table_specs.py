"""What the tables of README.md and docs have (tables.py), and the rows that are made of several."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from tables import Row, Table, is_number, largest, number, read, rendered

LINEAR = (
    "linear_attn A", "retention A", "simple_gla A", "gla A", "rwkv6 A", "gsa A", "hgrn A",
    "delta_rule A", "gated_delta_rule Q1", "gated_delta_product P", "comba A", "kda A",
    "dplr_delta_rule A", "rwkv7 A", "gdn2 A", "mamba3 A",
)  # fmt: skip
INPUTS_LEFT_OUT = "2026-11-25"  # of peak_GiB, from that day on
FULLY_TUNED_S = 100.0  # fla's autotuner tries all of its configurations; fewer took up to 20 s


def linear_rows() -> Iterator[Row]:
    """With fla's tuning, which older rows do not say, but a first call that tried all took long;
    and no memory in older rows, which counted the inputs too."""
    for row in read("linear_gpu_peers"):
        few = is_number(row["fla first_s"]) and float(row["fla first_s"]) < FULLY_TUNED_S
        tuned = row["fla tuned"] or ("few" if few else "full") if is_number(row["fla fwd"]) else ""
        older = {} if row["date"] >= INPUTS_LEFT_OUT else {"peak_GiB": "", "fla peak_GiB": ""}
        yield Row(row.file, {**row, "fla tuned": tuned, **older})


def beside_fla(rows: list[Row]) -> Row:
    """The newest beside fla tuned in full, else beside fla, else of all."""
    tuned = [x for x in rows if x["fla tuned"] == "full"]
    peers = [x for x in rows if is_number(x["fla fwd"])]
    return (tuned or peers or rows)[-1]


def block_rows() -> Iterator[Row]:
    """Of each work those of its newest run (rows one after another) that has the most providers."""
    runs: dict[str, list[dict[str, Row]]] = {}
    last = ""
    for row in read("blocks_gpu"):
        of = runs.setdefault(row["work"], [])
        if row["work"] != last:
            of.append({})
        of[-1][row["who"]] = row
        last = row["work"]
    for of in runs.values():
        most = max(map(len, of))
        for row in [x for x in of if len(x) == most][-1].values():
            apart = rendered("{fwd_ms:3} / {bwd_ms:3}", {"": row})
            yield Row(row.file, {**row, "ms": apart or number(row["both_ms"], 3)})


def without(name: str, column: str, part: str) -> Iterator[Row]:
    """The rows that have this part in a column, with the rest of its text."""
    for x in read(name):
        if part in x[column]:
            yield Row(name, {**x, column: x[column].replace(part, "")})


def matmul_rows() -> Iterator[Row]:
    """The default kernel of each product, or the fastest where only named ones were timed."""
    latest: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("matmul_gpu"):
        key = tuple(row[x] for x in ("shape", "dtype", "layout"))
        latest.setdefault(key, {})[row["impl"]] = row
    for (_, dtype, _), found in latest.items():
        row = found.get("chosen") or max(found.values(), key=lambda x: float(x["tflops"]))
        what = f"{dtype} {row['precision'] if dtype == 'float32' else ''}".strip()
        yield Row(row.file, {**row, "what": what})


# fla's tests of its tuner and choice of kernels, and of operators that slipstream.compat refuses by
# name: none of their cases can run
OMITTED = {
    "backends", "cache", "deltaformer", "dplr_tilelang", "gdn_kernels", "intracard_cache",
    "log_linear_attn", "mesa", "moba", "nsa", "parallax", "path_attn", "solve_tril", "titans",
    "ttt", "wall_attn",
}  # fmt: skip


def is_omitted(package: str, file: str) -> bool:
    """Whether none of its cases can run."""
    return package == "fla" and Path(file).stem.split("_", 1)[1] in OMITTED


def suite_rows() -> Iterator[Row]:
    """The newest counts of tools/peer_suites.py of each file, added up by package and device."""
    last: dict[tuple[str, str, str], Row] = {}
    for x in read("peer_suites"):
        ran = int(x["passed"]) or int(x["failed"])
        # without either it ran out of time, or every case was skipped
        if ran or x["skipped"] == x["cases"]:
            last[x["package"], x["device"], x["file"]] = x
    for package, device in dict.fromkeys(x[:2] for x in last):
        of = [
            x
            for (*where, file), x in last.items()
            if where == [package, device] and not is_omitted(package, file) and x["cases"] != "0"
        ]
        of = [x for x in of if int(x["passed"]) or int(x["failed"])]
        counts = {y: str(sum(int(x[y]) for x in of)) for y in ("passed", "failed", "skipped")}
        yield Row("peer_suites", {**of[0], **counts, "files": str(len(of))}, of)


Losses = dict[str, dict[int, Row]]  # "ours 0", "fla 0" or "moved 0" -> step -> row
PARTS = {"train": "train", "held-out": "held out", "all-held-out": "all of held out"}


def losses() -> dict[tuple[str, str], Losses]:
    """By model and part, of those with seeds, on the GPU that was last to have two of them; of
    several runs from a seed the one that got on the farthest, or the last of them."""
    found: dict[tuple[str, str], dict[str, dict[str, list[dict[int, Row]]]]] = {}
    for x in read("convergence"):
        run, step, gpu = x["run"], int(x["step"]), x["device"]
        if run[-1].isdigit():
            gpus = found.setdefault((x["model"], x["part"]), {})
            runs = gpus[gpu] = gpus.pop(gpu, {})
            tries = runs.setdefault(run, [{}])
            if step <= max(tries[-1], default=0):
                tries.append({})
            tries[-1][step] = x
    chosen = {}
    for of, gpus in sorted(found.items()):
        for runs in gpus.values():
            farthest = {run: max(reversed(tries), key=max) for run, tries in runs.items()}
            if complete(farthest):
                chosen[of] = farthest
    return chosen


def complete(runs: Losses) -> dict[int, list[str]]:
    """Steps that ours and fla's of two seeds at least have reached, and these seeds."""
    seeds = sorted({x.split()[1] for x in runs})
    found = {}
    for step in sorted({y for x in runs.values() for y in x}):
        have = [x for x in seeds if all(step in runs.get(f"{y} {x}", {}) for y in ("ours", "fla"))]
        if len(have) > 1:
            found[step] = have
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def gaps(runs: Losses, step: int, seeds: Sequence[str]) -> tuple[float, float, float]:
    """Mean distance of ours to fla from the same seed, between fla's seeds, and of fla's moved runs
    to fla from the same seed, NaN if there are none."""
    loss = {x: float(of[step]["loss"]) for x, of in runs.items() if step in of}
    fla = [loss[f"fla {x}"] for x in seeds]
    ours = [abs(loss[f"ours {x}"] - y) for x, y in zip(seeds, fla, strict=True)]
    moved = [(loss.get(f"moved {x}"), y) for x, y in zip(seeds, fla, strict=True)]
    return (
        mean(ours),
        mean([abs(x - y) for x, y in combinations(fla, 2)]),
        mean([abs(x - y) for x, y in moved if x is not None]),
    )


def convergence_rows() -> Iterator[Row]:
    """At the last step, and of distances the means over the steps of its second half."""
    for (model, part), runs in losses().items():
        steps = complete(runs)
        step, seeds = max(steps.items())
        half = [x for x in steps if 2 * x >= step]
        figures = {
            who: mean([float(runs[f"{who} {x}"][step]["loss"]) for x in seeds])
            for who in ("ours", "fla")
        }
        figures |= zip(("end 0", "end 1", "end 2"), gaps(runs, step, seeds))
        over = zip(*(gaps(runs, x, steps[x]) for x in half))
        figures |= zip(("half 0", "half 1", "half 2"), map(mean, over))
        texts = {k: "" if x != x else f"{x:.4f}" for k, x in figures.items()}
        of = [y for run in runs.values() for x, y in run.items() if x in half]
        named = {"model": f"{model}, {PARTS[part]}", "step": str(step), "seeds": str(len(seeds))}
        yield Row("convergence", {**named, **texts}, of)


SEGMENT = "8192"  # tokens, of the deterministic mode


def context_rows(segments: str = "") -> Iterator[Row]:
    """Every row of several GPUs, and one GPU's from the same run: with the tokens of all ("one"),
    and with as many as each has ("alone"; of attention, whose work grows with the square, with all
    of them). `who` says which; share is the speed of each GPU over that of the one "alone"."""
    everything = read("context_parallel")
    for i, many in enumerate(everything):
        gpus = int(many["gpus"])
        if gpus == 1 or many["segments"] != segments:
            continue
        each = str(int(many["tokens"]) // gpus)
        same = [
            x
            for x in everything[:i]
            if x["gpus"] == "1" and all(x[y] == many[y] for y in ("operator", "heads", "gate"))
        ]
        named = {"each": f"{int(each):,}", "GPUs": many["gpus"]}
        one = [x for x in same if x["tokens"] == many["tokens"]]
        work = gpus if many["operator"] == "attention" else 1
        alone = one if work > 1 else [x for x in same if x["tokens"] == each]
        shares = {}
        if alone:
            for part in ("fwd", "both"):
                share = float(alone[-1][part]) / work / float(many[part])
                shares[f"{part} share"] = f"{share:.2f}"
        yield Row(many.file, {**many, **named, "fwd share": "", "both share": "", **shares,
                              "who": {2: "two", 4: "four"}[gpus]}, [many, *alone[-1:]])  # fmt: skip
        if one and gpus == 2:
            yield Row(many.file, {**one[-1], **named, "who": "one"}, [one[-1]])


def in_order_rows() -> Iterator[Row]:
    """The deterministic mode, and the same calls without it."""
    for who, segments in (("with", SEGMENT), ("without", "")):
        for row in context_rows(segments):
            if row["each"] == "65,536" and row["gate"] == "weak" and row["who"] != "one":
                yield Row(row.file, {**row, "who": who}, row.of)


TRAINED = {
    "fsdp2": "a model of 0.35 B, FSDP2, 32,768 tokens a GPU",
    "context": "the same, one sequence of 262,144 tokens, checkpointed",
    "million": "a gated_deltanet layer, 1,048,576 tokens, checkpointed",
}


def parallel_training_rows() -> Iterator[Row]:
    """Each number of GPUs, beside one GPU of the same run."""
    one: dict[str, Row] = {}
    for row in read("parallel_training"):
        if row["gpus"] == "1":
            one[row["case"]] = row
            continue
        named = {"step": TRAINED[row["case"]], "GPUs": row["gpus"]}
        yield Row(row.file, {**row, **named, "who": "all"}, [row])
        if row["case"] in one:
            yield Row(row.file, {**one[row["case"]], **named, "who": "one"}, [one[row["case"]]])


ERRORS = ("out error", "grad error", "gate error")
OURS, FLA = "{fwd:3} / {both:3}", "{fla fwd:3} / {fla both:3}"
# table, line, what it is called, unit, peer, ours and the peer's, work and names in errors.csv
SUMMARY = (
    ("flash_qla", "Q1", "gated delta rule, 8192 tokens, 16 heads of q and k, 64 of v", "ms",
     "FlashQLA", "{slipstream_ms:3} / {slipstream_both_ms:3}",
     "{flash_qla_ms:3} / {flash_qla_both_ms:3}", "gated_delta_rule Q1", "ours", "flash_qla"),
    *(("linear", f"{x} A", f"{x}, 8192 tokens, 96 heads", "ms", "fla", OURS, FLA, f"{x} A", "",
       "fla") for x in ("gla", "kda", "rwkv7")),
    ("attention", "4,4096,16,128 True", "causal attention, 4 x 4096 tokens, 16 heads", "TFLOP/s",
     "cuDNN", "{sm90 fwd:3} / {sm90 bwd:3}", "{cudnn fwd:3} / {cudnn bwd:3}",
     "attention 4,4096,16,128 causal", "sm90", "cudnn"),
    ("blocks", "cross_entropy 16384x32000", "cross entropy, 16384 x 32000, with backward", "ms",
     "Liger", "{ours@ms}", "{liger@ms}", "cross_entropy 16384x32000", "ours", "liger"),
)  # fmt: skip


def summary_rows() -> Iterator[Row]:
    """One for each kind of operator: ours and the peer's times, and the largest errors of both,
    of the row itself where it has them."""
    for table, name, what, unit, peer, ours, theirs, work, our_name, peer_name in SUMMARY:
        line = TABLES[table].found()[name]
        row = next(iter(line.values()))
        cells = {"what": what, "unit": unit, "peer": peer, "card": rendered("{gpu}", line)}
        cells |= {"ours": rendered(ours, line), "theirs": rendered(theirs, line)}
        of = [*line.values()] if table != "blocks" else [line["ours"], line["liger"]]
        for who, kind, columns in ((our_name, "error", ERRORS), (peer_name, "off", ["fla error"])):
            cells[kind] = largest(row.get(x, "") for x in columns)
            if not cells[kind]:
                last = [x for x in read("errors") if (x["work"], x["who"]) == (work, who)][-1]
                cells[kind] = largest(last.get(x, "") for x in ERRORS)
                of.append(last)
        yield Row("", {**row, **cells}, of)


WAYS = {
    shown: f"{{torch@{x}:4}} / {{fla@{x}:4}} / {{patched@{x}:4}}"
    for x, shown in (("train ms", "ms a step"), ("B1 tokens/s", "tokens/s, one row"),
                     ("B16 tokens/s", "tokens/s, 16 rows"))
}  # fmt: skip
STRENGTHS = {
    x: f"{{{x}@fwd:4 ~ [-0.1,0]@fwd:4}} / {{{x}@both:4 ~ [-0.1,0]@both:4}}"
    for x in ("[-5,0]", "-5", "[-9,0]", "[-20,0]")
}
WORKS = (
    "rms_norm 32768x2048", "l2_norm 262144x128",
    "cross_entropy 16384x32000", "cross_entropy 8192x151936", "linear_ce 16384x32000",
    "short_conv 4x4096x4096 W4", "swiglu 16384x8192",
)  # fmt: skip
TABLES: dict[str, Table] = {
    "summary": Table(
        summary_rows, "what",
        {"": "{what}", "Slipstream": "{ours}", "peer": "{peer}", "peer's": "{theirs}",
         "unit": "{unit}", "GPU": "{card}", "largest error": "{error}", "the peer's": "{off}"},
    ),
    "linear": Table(
        linear_rows, "operator, shape",
        {"operator": "{operator} {shape}", "ms": "{fwd:3} / {both:3}",
         "fla, ms": "{fla fwd:3} / {fla both:3}", "fla's tuning": "{fla tuned}",
         "fla / ours": "{fla fwd:3 ~ fwd:3} / {fla both:3 ~ both:3}", "GiB": "{peak_GiB:3}",
         "fla, GiB": "{fla peak_GiB:3}", "error": "{out error+grad error+gate error!}",
         "fla's": "{fla error!}", "measured": "{measured}"},
        "bench/linear.py", lines=LINEAR, pick=beside_fla,
    ),
    "strong_gates": Table(
        "strong_gates", "operator, gates, kernels",
        {"operator": "{operator}", "gates": "{gates}", "kernels": "{kernels}",
         "[-0.1,0], ms": "{[-0.1,0]@fwd:4} / {[-0.1,0]@both:4}", **STRENGTHS},
        by="strength",
        where={"gates": "bfloat16"},
    ),
    "flash_qla": Table(
        "delta_peers", "shape",
        {"shape": "{shape}", "ms": "{slipstream_ms:3} / {slipstream_both_ms:3}",
         "FlashQLA, ms": "{flash_qla_ms:3} / {flash_qla_both_ms:3}"},
        "bench/linear.py --peer flash_qla", where={"flash_qla_kernels_ms": ".+"},
    ),
    "attention": Table(
        "attention_rows", "shape, causal",
        {"B,T,H,D": "{shape}", "causal": "{causal}", "sm_90 kernels": "{sm90 fwd:3} / {sm90 bwd:3}",
         "cuDNN": "{cudnn fwd:3} / {cudnn bwd:3}",
         "Triton kernels": "{portable fwd:3} / {portable bwd:3}",
         "torch's flash": "{flash fwd:3} / {flash bwd:3}",
         "sm_90 / cuDNN": "{sm90 fwd:3 ~ cudnn fwd:3} / {sm90 bwd:3 ~ cudnn bwd:3}",
         "measured": "{measured}"},
        "bench/attention.py",
    ),
    "blocks": Table(
        block_rows, "work",
        {"work": "{work}"}
        | {f"{x}, ms": f"{{{x.lower()}@ms}}" for x in ("ours", "torch", "fla", "Liger")}
        | {f"{x}, GiB": f"{{{x.lower()}@beyond_gib:2}}" for x in ("ours", "torch", "fla", "Liger")},
        "bench/blocks.py", by="who", lines=WORKS,
    ),
    "matmul": Table(
        matmul_rows, "shape, what, layout",
        {"M x N x K": "{shape}", "dtype": "{what}", "layout": "{layout}", "TFLOP/s": "{tflops:4}",
         "cuBLAS": "{library:4}", "ours / cuBLAS": "{tflops:4 ~ library:4}", "error": "{error!}"},
        "bench/matmul.py", where={"layout": "nt", "shape": "(128x4096|8192x8192).*"},
    ),
    "steps": Table(
        lambda: without("step_gpu", "what", "step "), "what, shape",
        {"operator": "{what}", "shape": "{shape}", "us": "{ms*1000:3}", "TB/s": "{TB/s:3}",
         "of copy bandwidth": "{of copy:2}"},
        "bench/decode.py",
        where={"shape": r"B(1|64) (H16 HV32.*|H32 HV32|H8 HV128 V64)"},
    ),
    "training": Table(
        lambda: without("training", "model", " checkpointed"), "model",
        {"mixer": "{model}", "ms": "{kept@ms:3}", "GiB": "{kept@peak_gib:3}",
         "checkpointed, ms": "{checkpointed@ms:3}",
         "checkpointed, GiB": "{checkpointed@peak_gib:3}",
         "checkpointed / kept": "{checkpointed@ms:3 ~ kept@ms:3}"},
        "bench/training.py --only checkpointed", by="who",
        lines=("attention", "retention", "gla", "gated_deltanet", "kda", "rwkv7"),
    ),
    "convergence": Table(
        convergence_rows, "model",
        {"model": "{model}", "step": "{step}", "seeds": "{seeds}", "ours": "{ours}", "fla": "{fla}",
         "apart at that step": "{end 0} / {end 1} / {end 2}",
         "apart in the second half": "{half 0} / {half 1} / {half 2}"},
        "bench/convergence.py",
    ),
    "transformers_models": Table(
        lambda: [x for x in read("transformers_models") if "host shared" not in x["note"]],
        "device, model",
        {"torch / fla / patched": "{model}, {gpu}", **WAYS,
         "step, torch / patched": "{torch@train ms:4 ~ patched@train ms:4}"},
        "bench/transformers_models.py", by="way",
    ),
    "peer_suites": Table(
        suite_rows, "package, device",
        {"package": "{package}", "on": "{gpu}", "files": "{files}", "passed": "{passed}",
         "failed": "{failed}", "skipped": "{skipped}"},
        "tools/peer_suites.py",
    ),
    "cpu": Table(
        "linear_cpu", "work",
        {"work": "{work}", "shape": "{shape}", "ms": "{ours_ms:3}",
         "transformers, ms": "{transformers_ms:3}", "ours / transformers": "{ratio:2}"},
        "bench/linear.py --peer cpu", where={"work": ".* forward.*"},
    ),
    "context_parallel": Table(
        context_rows, "operator, heads, each",
        {"operator": "{operator}", "heads": "{heads}", "tokens a GPU": "{each}",
         "one GPU with all, ms": "{one@fwd:3} / {one@both:3}",
         "two, ms": "{two@fwd:3} / {two@both:3}",
         "times as fast": "{one@fwd:3 ~ two@fwd:3} / {one@both:3 ~ two@both:3}",
         "memory, two / one": "{two@fwd_GiB:3 ~ one@fwd_GiB:3} / {two@both_GiB:3 ~ one@both_GiB:3}",
         "share of two": "{two@fwd share} / {two@both share}",
         "share of four": "{four@fwd share} / {four@both share}"},
        "bench/context_parallel.py", by="who", where={"gate": "weak", "heads": "16|32|64"},
    ),
    "context_in_order": Table(
        in_order_rows, "operator, heads, GPUs",
        {"operator": "{operator}", "heads": "{heads}", "GPUs": "{GPUs}",
         "ms": "{with@fwd:3} / {with@both:3}", "share": "{with@fwd share} / {with@both share}",
         "share without the mode": "{without@fwd share} / {without@both share}"},
        "bench/context_parallel.py --segments 8192", by="who",
        where={"heads": "16|32", "GPUs": "4"},
    ),
    "parallel_training": Table(
        parallel_training_rows, "step, GPUs",
        {"step": "{step}", "GPUs": "{GPUs}", "one GPU, ms": "{one@ms:4}", "all, ms": "{all@ms:4}",
         "tokens/s, x": "{all@tokens/s:9 ~ one@tokens/s:9}", "GiB a GPU": "{all@peak_GiB:3}"},
        "bench/parallel_training.py", by="who",
    ),
}  # fmt: skip

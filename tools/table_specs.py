"""The tables of README.md and docs: columns, and queries over bench/results (tables.py)."""

from statistics import median

from tables import Row, Table, largest, read, rendered

LINEAR = (
    "linear_attn A", "retention A", "simple_gla A", "gla A", "rwkv6 A", "gsa A", "hgrn A",
    "delta_rule A", "gated_delta_rule Q1", "gated_delta_product P", "comba A", "kda A",
    "dplr_delta_rule A", "rwkv7 A", "gdn2 A", "mamba3 A",
)  # fmt: skip
# Ours of the newest row of each. Of fla the newest that was tuned in full on that card, else tuned
# in part, else on the other; its error and memory, which are the same on both, of the newest row
# that has them. Older rows do not say how fla was tuned, but a first call that tried all took more
# than 100 s; and until 25 November peak_GiB counted the inputs.
BESIDE_FLA = """
    WITH known AS (
        SELECT *, is_number("fla fwd") AS beside,
            CASE WHEN "fla tuned" <> '' THEN "fla tuned"
                 WHEN is_number("fla first_s") AND "fla first_s" + 0 < 100 THEN 'few'
                 ELSE 'full' END AS tuned,
            iif(date < '2026-11-25', '', peak_GiB) AS ours_GiB,
            iif(date < '2026-11-25', '', "fla peak_GiB") AS fla_GiB FROM linear_gpu_peers),
    newest AS (SELECT *, max(n) FROM known GROUP BY operator, shape),
    pairs AS (
        SELECT newest.n AS mine, fla.n AS other, row_number() OVER (
            PARTITION BY newest.n ORDER BY fla.device = newest.device DESC,
                fla.tuned = 'full' DESC, fla.n DESC) AS place
        FROM newest LEFT JOIN known AS fla
            ON fla.beside AND (fla.operator, fla.shape) = (newest.operator, newest.shape)),
    last AS (
        SELECT operator, shape, max(iif(fla_GiB <> '', n, 0)) AS of_GiB,
            max(iif("fla error" <> '', n, 0)) AS of_error
        FROM known GROUP BY operator, shape)
    SELECT newest.*, newest.ours_GiB AS peak_GiB, fla."fla fwd" AS "fla fwd",
        fla."fla both" AS "fla both", fla.tuned || iif(fla.n = newest.n, '',
            iif(fla.device = newest.device, ', ', ', ' || substr(fla.device, 8, 4) || ', ')
            || CAST(strftime('%d', fla.date) AS INTEGER) || ' '
            || substr('JanFebMarAprMayJunJulAugSepOctNovDec', 3 * strftime('%m', fla.date) - 2, 3)
        ) AS tuned,
        (SELECT fla_GiB FROM known WHERE n = of_GiB) AS "fla peak_GiB",
        (SELECT "fla error" FROM known WHERE n = of_error) AS "fla error",
        (SELECT group_concat(source, ' ') FROM known
         WHERE n IN (newest.n, fla.n, of_GiB, of_error)) AS source
    FROM newest JOIN pairs ON mine = newest.n AND place = 1
        JOIN last USING (operator, shape) LEFT JOIN known AS fla ON fla.n = other
    ORDER BY newest.n"""

# of each work its newest run (rows one after another) that has the most providers
BLOCKS = """
    WITH marked AS (SELECT *, n - row_number() OVER (PARTITION BY work ORDER BY n) AS run
                    FROM blocks_gpu),
    ranked AS (SELECT work, run, row_number() OVER (
                   PARTITION BY work ORDER BY count(DISTINCT who) DESC, max(n) DESC) AS place
               FROM marked GROUP BY work, run)
    SELECT marked.* FROM marked JOIN ranked USING (work, run) WHERE place = 1 ORDER BY n"""

# the default kernel of each product, or the fastest where only named ones were timed
MATMUL = """
    WITH numbered AS (SELECT *, min(n) OVER (PARTITION BY shape, dtype, layout) AS since,
                          n = max(n) OVER (PARTITION BY shape, dtype, layout, impl) AS newest
                      FROM matmul_gpu),
    ranked AS (SELECT *, row_number() OVER (PARTITION BY shape, dtype, layout
                             ORDER BY impl <> 'chosen', tflops + 0 DESC) AS place
               FROM numbered WHERE newest)
    SELECT *, trim(dtype || ' ' || iif(dtype = 'float32', precision, '')) AS what
    FROM ranked WHERE place = 1 AND layout = 'nt' AND shape REGEXP '(128x4096|8192x8192).*'
    ORDER BY since"""

# fla's tests of its tuner and choice of kernels, and of operators that slipstream.compat refuses by
# name: none of their cases can run
OMITTED = (
    r"(.*/)?test_(backends|cache|deltaformer|dplr_tilelang|gdn_kernels|intracard_cache|"
    r"log_linear_attn|mesa|moba|nsa|parallax|path_attn|solve_tril|titans|ttt|wall_attn)\.py"
)
# The newest counts of tools/peer_suites.py of each file, added up by package and device. A file
# without cases that passed or failed ran out of time, or skipped all.
SUITES = f"""
    WITH ran AS (SELECT *, min(n) OVER (PARTITION BY package, device) AS since,
                     n = max(n) OVER (PARTITION BY package, device, file) AS newest
                 FROM peer_suites WHERE passed + failed OR skipped = cases)
    SELECT *, sum(passed) AS passed, sum(failed) AS failed, sum(skipped) AS skipped,
        count(*) AS files, group_concat(source, ' ') AS source
    FROM ran WHERE newest AND passed + failed
        AND NOT (package = 'fla' AND file REGEXP '{OMITTED}')
    GROUP BY package, device ORDER BY since"""

# Losses by model and part, of runs with seeds, on the GPU that was last to have two of them; of
# several runs from a seed the one that got on the farthest, or the last of them. `both` has the
# steps that ours and fla's of two seeds at least have reached.
LOSSES = """
    WITH repeated AS (
        SELECT *, step + 0 AS at, substr(run, 1, instr(run, ' ') - 1) AS who,
            substr(run, instr(run, ' ') + 1) AS seed,
            step + 0 <= lag(step + 0, 1, 0) OVER each_run AS again
        FROM convergence WHERE run GLOB '*[0-9]'
        WINDOW each_run AS (PARTITION BY model, part, device, run ORDER BY n)),
    tried AS (SELECT *, sum(again) OVER (
                  PARTITION BY model, part, device, run ORDER BY n) AS attempt FROM repeated),
    farthest AS (SELECT model, part, device, run, attempt, row_number() OVER (
                     PARTITION BY model, part, device, run ORDER BY max(at) DESC, attempt DESC)
                     AS place FROM tried GROUP BY model, part, device, run, attempt),
    runs AS (SELECT tried.* FROM tried JOIN farthest USING (model, part, device, run, attempt)
             WHERE place = 1),
    pairs AS (SELECT ours.model, ours.part, ours.device, ours.at, ours.seed
              FROM runs AS ours JOIN runs AS fla USING (model, part, device, at, seed)
              WHERE ours.who = 'ours' AND fla.who = 'fla'),
    ready AS (SELECT model, part, device, at FROM pairs
              GROUP BY model, part, device, at HAVING count(*) > 1),
    gpus AS (SELECT model, part, device, row_number() OVER (
                 PARTITION BY model, part ORDER BY max(n) DESC) AS place
             FROM tried JOIN (SELECT DISTINCT model, part, device FROM ready)
                 USING (model, part, device) GROUP BY model, part, device),
    losses AS (SELECT runs.*, loss + 0 AS nats FROM runs
               JOIN gpus USING (model, part, device) WHERE gpus.place = 1),
    both AS (SELECT pairs.*, max(at) OVER (PARTITION BY model, part) AS last FROM pairs
             JOIN gpus USING (model, part, device) JOIN ready USING (model, part, device, at)
             WHERE gpus.place = 1)
"""
# Means over seeds of the distance of ours to fla from the same seed (0), between fla's seeds (1)
# and of fla with weights off by a millionth to fla (2): at the last step, and over its second half.
CONVERGENCE = f"""{LOSSES},
    named AS (SELECT both.*, losses.who, losses.nats FROM both
              JOIN losses USING (model, part, at, seed)),
    apart AS (SELECT model, part, at, last, who, abs(x.nats - fla.nats) AS gap
              FROM named AS x JOIN (SELECT model, part, at, seed, nats FROM named
                  WHERE who = 'fla') AS fla USING (model, part, at)
              WHERE iif(x.who = 'fla', x.seed < fla.seed, x.seed = fla.seed)),
    gaps AS (SELECT model, part, at, last, avg(iif(who = 'ours', gap, NULL)) AS a,
                 avg(iif(who = 'fla', gap, NULL)) AS b, avg(iif(who = 'moved', gap, NULL)) AS c
             FROM apart GROUP BY model, part, at),
    ends AS (SELECT *, avg(iif(who = 'ours', nats, NULL)) AS our,
                 avg(iif(who = 'fla', nats, NULL)) AS their,
                 count(DISTINCT seed) AS seeds FROM named WHERE at = last GROUP BY model, part),
    halves AS (SELECT model, part, avg(a) AS a, avg(b) AS b,
                   iif(count(c) = count(*), avg(c), NULL) AS c
               FROM gaps WHERE 2 * at >= last GROUP BY model, part)
    SELECT model || ', ' || CASE part WHEN 'train' THEN 'train' WHEN 'held-out' THEN 'held out'
            ELSE 'all of held out' END AS model, ends.last AS step, seeds,
        printf('%.4f', our) AS ours, printf('%.4f', their) AS fla,
        printf('%.4f', gaps.a) AS "end 0", printf('%.4f', gaps.b) AS "end 1",
        iif(gaps.c IS NULL, '', printf('%.4f', gaps.c)) AS "end 2",
        printf('%.4f', halves.a) AS "half 0", printf('%.4f', halves.b) AS "half 1",
        iif(halves.c IS NULL, '', printf('%.4f', halves.c)) AS "half 2",
        (SELECT group_concat(source, ' ') FROM losses
         WHERE (losses.model, losses.part) = (ends.model, ends.part) AND losses.at IN
             (SELECT at FROM gaps AS x WHERE (x.model, x.part) = (ends.model, ends.part)
                  AND 2 * at >= last)) AS source
    FROM ends JOIN gaps USING (model, part, at) JOIN halves USING (model, part)
    ORDER BY ends.model, ends.part"""

# Rows of several GPUs ("two", "four"), and one GPU's from the same run, with the tokens of all
# ("one"). share is the speed of each GPU over that of one alone with as many tokens as each has; of
# attention, whose work grows with the square, with all of them.
CONTEXT = """
    WITH many AS (
        SELECT *, tokens / gpus AS per, iif(operator = 'attention', gpus + 0, 1) AS work
        FROM context_parallel WHERE gpus + 0 > 1),
    beside AS (
        SELECT many.n AS of, max(iif(x.tokens = many.tokens, x.n, NULL)) AS one,
            max(iif(x.tokens + 0 = iif(work > 1, many.tokens + 0, per), x.n, NULL)) AS alone
        FROM many LEFT JOIN context_parallel AS x ON x.gpus = '1' AND x.n < many.n
            AND (x.operator, x.heads, x.gate) = (many.operator, many.heads, many.gate)
        GROUP BY many.n),
    shares AS (
        SELECT many.*, one, trim(many.source || ' ' || coalesce(x.source, '')) AS all_sources,
            coalesce(printf('%.2f', x.fwd / work / many.fwd), '') AS a,
            coalesce(printf('%.2f', x.both / work / many.both), '') AS b
        FROM many JOIN beside ON of = many.n LEFT JOIN context_parallel AS x ON x.n = alone),
    context AS (
        SELECT operator, heads, gate, segments, printf('%,d', per) AS each, gpus,
            iif(gpus = '2', 'two', 'four') AS who, fwd, both, fwd_GiB, both_GiB, a AS "fwd share",
            b AS "both share", all_sources AS source, n FROM shares
        UNION ALL
        SELECT x.operator, x.heads, x.gate, shares.segments, printf('%,d', per), shares.gpus,
            'one', x.fwd, x.both, x.fwd_GiB, x.both_GiB, '', '', x.source, shares.n
        FROM shares JOIN context_parallel AS x ON x.n = one WHERE shares.gpus = '2')
    SELECT *"""

TRAINED = """CASE many."case" WHEN 'fsdp2' THEN 'a model of 0.35 B, FSDP2, 32,768 tokens a GPU'
    WHEN 'context' THEN 'the same, one sequence of 262,144 tokens, checkpointed'
    ELSE 'a gated_deltanet layer, 1,048,576 tokens, checkpointed' END"""
# each number of GPUs, beside one GPU of the same run
PARALLEL_TRAINING = f"""
    SELECT x.*, {TRAINED} AS step, many.gpus AS gpus, iif(x.n = many.n, 'all', 'one') AS who
    FROM parallel_training AS many JOIN parallel_training AS x ON x.n = many.n OR x.n =
        (SELECT max(n) FROM parallel_training AS y
         WHERE y.gpus = '1' AND y."case" = many."case" AND y.n < many.n)
    WHERE many.gpus <> '1' ORDER BY many.n, x.n = many.n"""

ERRORS = ("out error", "grad error", "gate error")
OURS, FLA = "{fwd:3} / {both:3}", "{fla fwd:3} / {fla both:3}"
EACH_MS = "{{{0}@fwd_ms:3}} / {{{0}@bwd_ms:3}} || {{{0}@both_ms:3}}"
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
     "Liger", EACH_MS.format("ours"), EACH_MS.format("liger"), "cross_entropy 16384x32000", "ours",
     "liger"),
)  # fmt: skip


def summary() -> list[Row]:
    """One for each kind of operator: ours and the peer's times, and the largest errors of both,
    of the row itself where it has them."""
    made = []
    for table, name, what, unit, peer, ours, theirs, work, our_name, peer_name in SUMMARY:
        line = TABLES[table].found()[name]
        row = next(iter(line.values()))
        cells = {"what": what, "unit": unit, "peer": peer, "card": rendered("{gpu}", line)}
        cells |= {"ours": rendered(ours, line), "theirs": rendered(theirs, line)}
        of = [*line.values()] if table != "blocks" else [line["ours"], line["liger"]]
        for who, kind, columns in ((our_name, "error", ERRORS), (peer_name, "off", ["fla error"])):
            cells[kind] = largest(row.get(x, "") for x in columns)
            if not cells[kind]:
                of.append([x for x in read("errors") if (x["work"], x["who"]) == (work, who)][-1])
                cells[kind] = largest(of[-1].get(x, "") for x in ERRORS)
        made.append({**cells, "source": " ".join(x["source"] for x in of)})
    return made


DELTA_PEERS = "SELECT * FROM delta_peers WHERE flash_qla_kernels_ms <> '' ORDER BY n"


def class_medians() -> list[Row]:
    """Of the newest rows of each class: by mapping and what is timed the median ratio."""
    newest = read(
        'SELECT *, max(n) FROM transformers_classes WHERE min("own ms" + 0, "ours ms" + 0) > 0 '
        "GROUP BY model, what ORDER BY n"
    )
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in newest:
        groups.setdefault((row["mapping"], row["what"]), []).append(row)
    return [
        {**rows[-1], "source": " ".join(x["source"] for x in rows), "classes": str(len(rows)),
         "ratio": f"{median(float(x['own ms']) / float(x['ours ms']) for x in rows):.3f}"}
        for rows in groups.values()
    ]  # fmt: skip


WAYS = {
    shown: f"{{torch@{x}:4}} / {{fla@{x}:4}} / {{patched@{x}:4}}"
    for x, shown in (("train ms", "ms a step"), ("prefill ms", "ms a prompt"),
                     ("B1 tokens/s", "tokens/s, one row"), ("B16 tokens/s", "tokens/s, 16 rows"))
}  # fmt: skip
STRENGTHS = {
    x: f"{{{x}@fwd:4 ~ [-0.1,0]@fwd:4}} / {{{x}@both:4 ~ [-0.1,0]@both:4}}"
    for x in ("[-5,0]", "-5", "[-9,0]", "[-20,0]")
}
KDA_BESIDE_CUDNN = {
    f"{who}{short}": f"{{{gates} {name}@forward_ms:3}} / {{{gates} {name}@both_ms:3}}"
    for short, gates in (("[-0.1,0]", "[-0.1,0]"), ("-1", "-1 sigmoid"), ("-5", "-5 sigmoid"))
    for who, name in (("", "slipstream"), ("cuDNN, ", "cudnn"))
}
GDN = ("[-0.1,0] slipstream", "[-0.1,0] flashinfer")
GDN_PEERS = {
    f"{who}{gates}": f"{{{gates} {name}@forward_ms:3}}{both}"
    for gates in ("[-0.1,0]", "-1 sigmoid")
    for who, name, both in (("", "slipstream", f" / {{{gates} slipstream@both_ms:3}}"),
                            ("FlashInfer, ", "flashinfer", ""))
}  # fmt: skip
WORKS = (
    "rms_norm 32768x2048", "l2_norm 262144x128",
    "cross_entropy 16384x32000", "cross_entropy 8192x151936", "linear_ce 16384x32000",
    "short_conv 4x4096x4096 W4", "swiglu 16384x8192",
)  # fmt: skip
TABLES: dict[str, Table] = {
    "summary": Table(
        summary, "what",
        {"": "{what}", "Slipstream": "{ours}", "peer": "{peer}", "peer's": "{theirs}",
         "unit": "{unit}", "GPU": "{card}", "largest error": "{error}", "the peer's": "{off}"},
    ),
    "linear": Table(
        BESIDE_FLA, "operator, shape",
        {"operator": "{operator} {shape}", "ms": "{fwd:3} / {both:3}",
         "fla, ms": "{fla fwd:3} / {fla both:3}", "fla's tuning": "{tuned}",
         "fla / ours": "{fla fwd:3 ~ fwd:3} / {fla both:3 ~ both:3}", "GiB": "{peak_GiB:3}",
         "fla, GiB": "{fla peak_GiB:3}", "error": "{out error+grad error+gate error!}",
         "fla's": "{fla error!}", "measured": "{measured}"},
        "bench/linear.py", lines=LINEAR,
    ),
    "strong_gates": Table(
        "SELECT * FROM strong_gates WHERE gates = 'bfloat16' ORDER BY n",
        "operator, gates, kernels",
        {"operator": "{operator}", "gates": "{gates}", "kernels": "{kernels}",
         "[-0.1,0], ms": "{[-0.1,0]@fwd:4} / {[-0.1,0]@both:4}", **STRENGTHS},
        "bench/gates.py", by="strength",
    ),
    "kda_peers": Table(
        """SELECT *, gates || ' ' || who AS way, max(error) OVER (PARTITION BY shape, who) AS worst
            FROM kda_peers ORDER BY n""", "shape",
        {"shape": "{shape}"} | KDA_BESIDE_CUDNN
        | {"largest error": "{-5 sigmoid slipstream@worst!}",
           "cuDNN's error": "{-5 sigmoid cudnn@worst!}"},
        "bench/delta.py --peers cudnn", by="way",
    ),
    "gdn_peers": Table(
        "SELECT *, gates || ' ' || who AS way FROM gdn_peers ORDER BY n", "shape",
        {"shape": "{shape}"} | {x.replace(" sigmoid", ""): y for x, y in GDN_PEERS.items()}
        | {"ours / FlashInfer": f"{{{GDN[0]}@forward_ms:3 ~ {GDN[1]}@forward_ms:3}}",
           "measured": f"{{{GDN[0]}@measured}}"},
        "bench/delta.py --peers flashinfer", by="way",
    ),
    "flash_qla": Table(
        DELTA_PEERS, "shape",
        {"shape": "{shape}", "ms": "{slipstream_ms:3} / {slipstream_both_ms:3}",
         "FlashQLA, ms": "{flash_qla_ms:3} / {flash_qla_both_ms:3}"},
        "bench/linear.py --peer flash_qla",
    ),
    "attention": Table(
        "attention_rows", "shape, causal",
        {"B,T,H,D": "{shape}", "causal": "{causal}", "sm_90 kernels": "{sm90 fwd:3} / {sm90 bwd:3}",
         "FlashAttention-4": "{fa4 fwd:3} / {fa4 bwd:3}", "cuDNN": "{cudnn fwd:3} / {cudnn bwd:3}",
         "Triton kernels": "{portable fwd:3} / {portable bwd:3}",
         "torch's flash or efficient":
             "{flash fwd:3} / {flash bwd:3} || {efficient fwd:3} / {efficient bwd:3}",
         "sm_90 / FlashAttention-4": "{sm90 fwd:3 ~ fa4 fwd:3} / {sm90 bwd:3 ~ fa4 bwd:3}",
         "sm_90 / cuDNN": "{sm90 fwd:3 ~ cudnn fwd:3} / {sm90 bwd:3 ~ cudnn bwd:3}",
         "measured": "{measured}"},
        "bench/attention.py",
    ),
    "blocks": Table(
        BLOCKS, "work",
        {"work": "{work}"}
        | {f"{x}, ms": EACH_MS.format(x.lower()) for x in ("ours", "torch", "fla", "Liger")}
        | {f"{x}, GiB": f"{{{x.lower()}@beyond_gib:2}}" for x in ("ours", "torch", "fla", "Liger")},
        "bench/blocks.py", by="who", lines=WORKS,
    ),
    "matmul": Table(
        MATMUL, "shape, what, layout",
        {"M x N x K": "{shape}", "dtype": "{what}", "layout": "{layout}", "TFLOP/s": "{tflops:4}",
         "cuBLAS": "{library:4}", "ours / cuBLAS": "{tflops:4 ~ library:4}", "error": "{error!}"},
        "bench/matmul.py",
    ),
    "steps": Table(
        r"""SELECT *, replace(what, 'step ', '') AS what FROM step_gpu WHERE instr(what, 'step ')
            AND shape REGEXP 'B(1|64) (H16 HV32.*|H32 HV32|H8 HV128 V64)' ORDER BY n""",
        "what, shape",
        {"operator": "{what}", "shape": "{shape}", "us": "{ms*1000:3}", "TB/s": "{TB/s:3}",
         "of copy bandwidth": "{of copy:2}"},
        "bench/decode.py",
    ),
    "training": Table(
        """SELECT *, replace(model, ' checkpointed', '') AS model FROM training
            WHERE instr(model, ' checkpointed') ORDER BY n""", "model",
        {"mixer": "{model}", "ms": "{kept@ms:3}", "GiB": "{kept@peak_gib:3}",
         "checkpointed, ms": "{checkpointed@ms:3}",
         "checkpointed, GiB": "{checkpointed@peak_gib:3}",
         "checkpointed / kept": "{checkpointed@ms:3 ~ kept@ms:3}"},
        "bench/training.py --only checkpointed", by="who",
        lines=("attention", "retention", "gla", "gated_deltanet", "kda", "rwkv7"),
    ),
    "varying": Table(
        """SELECT *, iif("case" = 'prefill, ms', 'prompt', tokens) AS way FROM varying
            WHERE "case" = 'packed, tokens/s' OR "case" = 'prefill, ms' AND date > '2026-11-28'
            ORDER BY n""", "name",
        {"mixer": "{name}", "32768 tokens, tokens/s": "{32768@ours:4}",
         "of whole rows": "{32768@ratio:3}", "8192 tokens, tokens/s": "{8192@ours:4}",
         "of its whole rows": "{8192@ratio:3}", "prompts, ms": "{prompt@ours:3}",
         "1000 tokens again, ms": "{prompt@same_or_whole:3}"},
        "bench/varying.py", by="way",
    ),
    "convergence": Table(
        CONVERGENCE, "model",
        {"model": "{model}", "step": "{step}", "seeds": "{seeds}", "ours": "{ours}", "fla": "{fla}",
         "apart at that step": "{end 0} / {end 1} / {end 2}",
         "apart in the second half": "{half 0} / {half 1} / {half 2}"},
        "bench/convergence.py",
    ),
    "transformers_models": Table(
        """SELECT * FROM transformers_models
           WHERE NOT instr(note, 'host shared') AND NOT instr(note, 'in turns') ORDER BY n""",
        "device, model",
        {"torch / fla / patched": "{model}, {gpu}", **WAYS,
         "step, torch / patched": "{torch@train ms:4 ~ patched@train ms:4}",
         "prompt, the same": "{torch@prefill ms:4 ~ patched@prefill ms:4}"},
        "bench/transformers_models.py", by="way",
    ),
    "transformers_turns": Table(
        "SELECT * FROM transformers_turns ORDER BY n", "model",
        {"own / ours, ms": "{model}", **{
            shown: f"{{{x}@own ms:4}} / {{{x}@ours ms:4}}"
            for x, shown in (("step", "a step"), ("prompt", "a prompt"), ("token", "a token"),
                             ("token, 16 rows", "a token of 16 rows"))},
         "token, own / ours": "{token@own ms:4 ~ token@ours ms:4}"},
        "bench/transformers_turns.py", by="what",
    ),
    "transformers_classes": Table(
        class_medians, "mapping",
        {"mapping": "{mapping}", "classes": "{prompt@classes}",
         **{f"{x}, own / ours": f"{{{x}@ratio:3}}" for x in ("prompt", "step", "token")}},
        "bench/transformers_turns.py --classes FILE", by="what",
    ),
    "peer_suites": Table(
        SUITES, "package, device",
        {"package": "{package}", "on": "{gpu}", "files": "{files}", "passed": "{passed}",
         "failed": "{failed}", "skipped": "{skipped}"},
        "tools/peer_suites.py",
    ),
    "cpu": Table(
        "SELECT * FROM linear_cpu WHERE work REGEXP '.* forward.*' ORDER BY n", "work",
        {"work": "{work}", "shape": "{shape}", "ms": "{ours_ms:3}",
         "transformers, ms": "{transformers_ms:3}", "ours / transformers": "{ratio:2}"},
        "bench/linear.py --peer cpu",
    ),
    "context_parallel": Table(
        f"""{CONTEXT} FROM context WHERE segments = '' AND gate = 'weak'
            AND heads IN ('16', '32', '64') ORDER BY n""", "operator, heads, each",
        {"operator": "{operator}", "heads": "{heads}", "tokens a GPU": "{each}",
         "one GPU with all, ms": "{one@fwd:3} / {one@both:3}",
         "two, ms": "{two@fwd:3} / {two@both:3}",
         "times as fast": "{one@fwd:3 ~ two@fwd:3} / {one@both:3 ~ two@both:3}",
         "memory, two / one": "{two@fwd_GiB:3 ~ one@fwd_GiB:3} / {two@both_GiB:3 ~ one@both_GiB:3}",
         "share of two": "{two@fwd share} / {two@both share}",
         "share of four": "{four@fwd share} / {four@both share}"},
        "bench/context_parallel.py", by="who",
    ),
    "context_in_order": Table(
        f"""{CONTEXT}, iif(segments = '', 'without', 'with') AS who FROM context
            WHERE segments IN ('', '8192') AND gate = 'weak' AND each = '65,536' AND who <> 'one'
            AND gpus = '4' AND heads IN ('16', '32') ORDER BY segments = '', n""",
        "operator, heads, gpus",
        {"operator": "{operator}", "heads": "{heads}", "GPUs": "{gpus}",
         "ms": "{with@fwd:3} / {with@both:3}", "share": "{with@fwd share} / {with@both share}",
         "share without the mode": "{without@fwd share} / {without@both share}"},
        "bench/context_parallel.py --segments 8192", by="who",
    ),
    "parallel_training": Table(
        PARALLEL_TRAINING, "step, gpus",
        {"step": "{step}", "GPUs": "{gpus}", "one GPU, ms": "{one@ms:4}", "all, ms": "{all@ms:4}",
         "tokens/s, x": "{all@tokens/s:9 ~ one@tokens/s:9}", "GiB a GPU": "{all@peak_GiB:3}"},
        "bench/parallel_training.py", by="who",
    ),
}  # fmt: skip

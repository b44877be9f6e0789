"""Compares every class of transformers' models under "slipstream" with "eager"; writes the table.

python tools/transformers_table.py [--results FILE] [--jobs 1] [--only TEXT]
python tools/tables.py --write    fills in the times

Tiny random models on a CPU: tests/support/tiny_models.py. An hour on one core for all classes;
results are kept in FILE, so that a run that was stopped goes on where it was.
"""

import argparse
import json
import logging
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
TABLE = Path(__file__).parents[1] / "docs" / "guides" / "transformers_table.md"
SECONDS = 120  # for one class
OUTCOMES = ("matches", "own attention", "refused", "differs")
TIME = """## Time

Beside transformers' own, in turns in one process: the medians of five, the host waiting for the
GPU after each. Four layers of models that [patch()](transformers_patch.md) takes, 1,024 wide in
bf16: a training step of 2,048 tokens, a prompt of as many, a token of `generate`. So few layers
leave a token to the host; own is plain torch, with `"sdpa"` where a model has it.

<!-- table transformers_turns -->
<!-- end of table -->

The classes above with the configurations above, on rows of 96 tokens: the host's time, by mapping
the median over classes of own attention's time over ours.

<!-- table transformers_classes -->
<!-- end of table -->
"""
Results = dict[str, dict[str, list[str]]]
HEAD = """# Every class of transformers

Written by `tools/transformers_table.py` with transformers {version}. Classes that transformers'
auto mappings list are built with a tiny configuration and random weights, once with `"eager"` and
once with `attn_implementation="slipstream"`: forward, backward, padded on either side, generation.
{listed} classes are listed; {tried} were tried, and {ran} ran. For the others the tool makes
no configuration or inputs, as the last table says.

- matches: it calls Slipstream, and the results are eager's.
- own attention: it does not use transformers' `AttentionInterface`, and keeps what it has.
- refused: an exception. differs: other results than eager's.

`sdpa` is transformers' own, in the same comparison.
"""


class Late(BaseException):
    """An error of no class: the comparison takes exceptions for refusals."""


def stop(*_: Any) -> None:
    raise Late(f"more than {SECONDS} s")


def one(name: str) -> tuple[str, dict[str, list[str]]]:
    from tests.support.tiny_models import Comparison, compare, reason

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        found = compare(name)
    except Late as error:
        found = dict.fromkeys(("slipstream", "sdpa"), Comparison("not run", reason(error)))
    finally:
        signal.alarm(0)
    return name, {impl: list(result) for impl, result in found.items()}


def in_turn(classes: dict[str, tuple[str, str]]) -> list[str]:
    """One class of every model type first, then the second of each."""
    before: Counter[str] = Counter()
    turn: dict[str, int] = {}
    for name, (model_type, _) in classes.items():
        turn[name] = before[model_type]
        before[model_type] += 1
    return sorted(classes, key=turn.__getitem__)


def prepare() -> None:
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)


def measured(names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, list[str]]]]:
    context = multiprocessing.get_context("spawn")
    # a class may leave modules behind that others do not need
    with context.Pool(jobs, initializer=prepare, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(one, names)


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def short(why: str) -> str:
    why = why.replace("|", "/")
    return why if len(why) <= 110 else f"{why[:110].rpartition(' ')[0]} ..."


def page(results: Results, classes: dict[str, tuple[str, str]], version: str) -> str:
    ran = {n: r for n, r in results.items() if r["slipstream"][0] != "not run"}
    parts = [HEAD.format(version=version, ran=len(ran), tried=len(results), listed=len(classes))]
    counts = {i: Counter(r[i][0] for r in ran.values()) for i in ("slipstream", "sdpa")}
    rows = [[x, counts["slipstream"][x], counts["sdpa"][x]] for x in OUTCOMES]
    parts += ["## All\n", table(["", "slipstream", "sdpa"], rows), "## By mapping\n"]
    mappings = list(dict.fromkeys(mapping for _, mapping in classes.values()))
    rows = []
    for mapping in mappings:
        here = [r for n, r in ran.items() if classes[n][1] == mapping]
        by = [Counter(r[i][0] for r in here) for i in ("slipstream", "sdpa")]
        listed = sum(m == mapping for _, m in classes.values())
        cells = ["/".join(str(c[x]) for x in OUTCOMES) for c in by]
        rows.append([mapping.removesuffix("_MAPPING_NAMES").lower(), listed, len(here), *cells])
    parts.append("The last two columns count: matches/own attention/refused/differs.\n")
    parts.append(table(["mapping", "classes", "ran", "slipstream", "sdpa"], rows))
    parts.append(TIME)
    rows = [
        [n, r["slipstream"][0], short(r["slipstream"][1]), r["sdpa"][0]]
        for n, r in sorted(ran.items())
        if r["slipstream"][0] not in ("matches", "own attention")
    ]
    parts += ["## Refused, or different\n", table(["class", "slipstream", "why", "sdpa"], rows)]
    own = sorted(n for n, r in ran.items() if r["slipstream"][0] == "own attention")
    parts += ["## Own attention\n", ", ".join(own) + ".\n"]
    left = Counter(short(r["slipstream"][1]) for n, r in results.items() if n not in ran)
    rows = [[why, n] for why, n in left.most_common() if n > 1]
    rows.append(["another reason each", len(results) - len(ran) - sum(n for _, n in rows)])
    parts += ["## Not run\n", table(["why", "classes"], rows)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("transformers_results.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="classes whose name has this in it")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so long")
    args = parser.parse_args()
    import transformers

    from tests.support.tiny_models import classes

    results: Results = {}
    if args.results.exists():
        results = dict(map(json.loads, args.results.read_text().splitlines()))
    names = [n for n in in_turn(classes()) if args.only in n and n not in results]
    late = time.monotonic() + 60 * args.minutes
    with args.results.open("a") as file:
        for done, (name, result) in enumerate(measured(names, args.jobs), 1):
            results[name] = result
            print(json.dumps([name, result]), file=file, flush=True)
            print(f"{done}/{len(names)} {name}: {result['slipstream'][0]}", flush=True)
            if time.monotonic() > late:
                break
    TABLE.write_text(page(results, classes(), transformers.__version__))


if __name__ == "__main__":
    main()

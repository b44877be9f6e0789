"""Every number of README.md and docs, and the row of bench/results that it comes from.

    python tools/claims.py            lists them: page, table, row, number, places in the CSVs
    python tools/claims.py --write    writes the generated tables into the pages
    python tools/claims.py --check    fails if a table is not up to date or a number has no row

A page has a table between the lines "<!-- table NAME -->" and "<!-- end of table -->". Outside of
them a page must not state a measurement: a number with a unit of time, speed or memory, a
comparison such as "half of the time", and on the performance page and README any number with
decimals. ALLOWED lists what else is meant.
"""

import re
import sys
from pathlib import Path

from performance_tables import claims, tables
from table_cells import Table

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
UNIT = r"(?:[num]?s|seconds?|minutes?|hours?|TFLOP/s|[TGM]B/s|[KMG]i?B|tokens/s|%|percent|times|x)"
MEASURED = re.compile(rf"(?<![\w.^])\d+(?:[.,]\d+)*(?:e-?\d+)? ?{UNIT}(?![\w/])")
COMPARED = re.compile(
    r"\b(?:twice|half|thirds?|quarter|double|(?:two|three|four|five|six|ten|several)\s+times)\b"
    r"[^.]{0,40}?\b(?:as\s+(?:long|fast|much|large)|faster|slower|longer|time|memory|speed)\b",
    re.IGNORECASE,
)
VERSION = re.compile(
    r"\b(?:Python|torch|Triton|transformers|ptxas|CUDA|Slipstream|fla-core|FlashQLA|TRL|numpy|and|to|or)"
    r" \(?\d+(?:\.\d+)+"
)
DECIMAL = re.compile(r"(?<![\w.^])\d+\.\d+(?:e-?\d+)?(?!\w|\.\d)")
# what was tried, facts without a time, and what is generated from other data
RECORDS = ("docs/dev/", "docs/SUPPORT.md", "docs/_build/")
STRICT = ("README.md", "docs/performance.md", "docs/index.md")
# (page, text): what is no measurement
ALLOWED = {
    ("docs/tools/matrix.md", "180 s"): "a default of the command",
    ("CHANGELOG.md", "512 MiB"): "a bound that the code sets",
}


def pages() -> list[Path]:
    top = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "bench/README.md")
    found = [*(ROOT / x for x in top), *sorted((ROOT / "docs").rglob("*.md"))]
    return [x for x in found if not name_of(x).startswith(RECORDS)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def written(text: str, found: dict[str, Table]) -> str:
    """A page with its tables as they should be."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in found:
            raise ValueError(f"table {match[2]}: no such table; want one of {', '.join(found)}")
        return f"{match[1]}{found[match[2]].text()}\n{match[4]}"

    return BLOCK.sub(block, text)


def unsupported(page: str, text: str) -> list[str]:
    """Numbers outside of generated tables and of code that state a measurement."""
    prose = VERSION.sub("", CODE.sub("", BLOCK.sub("", text)))
    found = [x[0] for x in MEASURED.finditer(prose)]
    found += [" ".join(x[0].split()) for x in COMPARED.finditer(prose)]
    if page in STRICT:
        found += [x[0] for x in DECIMAL.finditer(prose)]
    return [x for x in dict.fromkeys(found) if (page, x) not in ALLOWED]


def problems(page: str, text: str, found: dict[str, Table]) -> list[str]:
    lines = [f"{page}: {x}: has no row in bench/results" for x in unsupported(page, text)]
    if written(text, found) != text:
        lines.append(f"{page}: run python tools/claims.py --write")
    return lines


def main(arguments: list[str]) -> int:
    found = tables()
    texts = {x: x.read_text(encoding="utf-8") for x in pages()}
    if "--write" in arguments:
        for path, text in texts.items():
            if (new := written(text, found)) != text:
                path.write_text(new, encoding="utf-8")
        return 0
    if "--check" in arguments:
        wrong = [y for path, text in texts.items() for y in problems(name_of(path), text, found)]
        print("\n".join(wrong) or "claims: every number has its row")
        return 1 if wrong else 0
    for path, text in texts.items():
        used = [found[x[2]] for x in BLOCK.finditer(text)]
        for table, row, cell in claims(used):
            print(f"{name_of(path)}: {table}: {row}: {cell.text} <- {'; '.join(cell.sources)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

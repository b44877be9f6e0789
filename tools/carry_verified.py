"""Carries verification to the sources that are here: over a change, or from other machines.

    python tools/carry_verified.py list > trusted.json      before the change
    ... rename or move kernels; `kernel_hashes.py compare` finds no difference ...
    python tools/carry_verified.py write trusted.json       after it

    python tools/carry_verified.py merge FOLDER ...         from other machines

`tools/matrix.py --record` takes hours to verify every kernel again. A change that leaves the
compiler's input as it was leaves what the matrix found true: `write` renews the digests alone.

A FOLDER has the support.json and verified.json that a machine with many processors has recorded,
which began without any. What its kernels were is compared with those that are here: other families
do not become verified.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import own_checkout  # noqa: F401
import support_page

from slipstream.compiler import compiler_state

Key = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("list", "write", "merge"))
    parser.add_argument("files", type=Path, nargs="*", help="what `list` printed, or the folders")
    args = parser.parse_args()
    if args.command == "list":
        print(
            json.dumps([[*key, sorted(found)] for key, found in compiler_state.verified().items()])
        )
    elif args.command == "write":
        rows = _recorded(support_page.VERIFIED)
        for arch, triton, ptxas, families in json.loads(args.files[0].read_text()):
            now = compiler_state.families(compiler_state.uses_gluon(arch, triton))
            rows[arch, triton, ptxas] |= {x: now[x] for x in families if x in now}
        support_page.write_verified(rows)
    else:
        for folder in args.files:
            merge(folder)


def merge(folder: Path) -> None:
    """Takes and prints a folder's columns of docs/SUPPORT.md, and its verified families."""
    data, rows = support_page.read(support_page.DATA), _recorded(support_page.VERIFIED)
    for release, columns in support_page.read(folder / "support.json").items():
        data.setdefault(release, {}).update(columns)
        for arch, column in columns.items():
            words = Counter(status for status, _ in column["operators"].values())
            print(f"{arch} {release}: {column['kernels']} kernels,", dict(words))
    for key, found in _recorded(folder / "verified.json").items():
        now = compiler_state.families(compiler_state.uses_gluon(*key[:2]))
        rows[key] = {x: digest for x, digest in found.items() if now.get(x) == digest}
        print(*key, f"{len(rows[key])} of {len(now)} families verified")
        for why, names in (
            ("changed", found.keys() - rows[key]),
            ("not recorded", now.keys() - found),
        ):
            if names:
                print(f"    {why}: {' '.join(sorted(names))}")
    support_page.write_data(data)
    support_page.write_verified(rows)


def _recorded(file: Path) -> dict[Key, dict[str, str]]:
    return {
        (x["arch"], x["triton"], x["ptxas"]): x["families"] for x in json.loads(file.read_text())
    }


if __name__ == "__main__":
    main()

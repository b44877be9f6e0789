"""Carries verification over a change that tools/kernel_hashes.py has shown to be harmless.

    python tools/carry_verified.py list > trusted.json      before the change
    ... rename or move kernels; `kernel_hashes.py compare` finds no difference ...
    python tools/carry_verified.py write trusted.json       after it

`slipstream matrix --record` takes hours to verify every kernel again. A change that leaves the
compiler's input as it was leaves what the matrix found true: here only the digests are renewed.
"""

import argparse
import json
from pathlib import Path

from slipstream.compiler import compiler_state
from slipstream.tools.support_page import VERIFIED, write_verified


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("list", "write"))
    parser.add_argument("file", type=Path, nargs="?", help="of `write`: what `list` printed")
    args = parser.parse_args()
    if args.command == "list":
        print(
            json.dumps([[*key, sorted(found)] for key, found in compiler_state.verified().items()])
        )
        return
    rows = {(x["arch"], x["triton"], x["ptxas"]): x["families"] for x in _recorded()}
    for arch, triton, ptxas, families in json.loads(args.file.read_text()):
        now = compiler_state.families(compiler_state.uses_gluon(arch, triton))
        rows[arch, triton, ptxas] |= {x: now[x] for x in families}
    write_verified(rows)


def _recorded() -> list[dict]:
    return json.loads(VERIFIED.read_text())


if __name__ == "__main__":
    main()

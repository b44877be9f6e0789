"""Compiles as `slipstream matrix` does, what only layers launch too, and records what came of it.

    python tools/record_matrix.py                            every kernel, every architecture
    python tools/record_matrix.py --triton 3.7.1,3.8.0       under these releases
    python tools/record_matrix.py kda gla --arch sm_80       cells of docs/SUPPORT.md alone

Writes docs/support.json, docs/SUPPORT.md and slipstream/compiler/verified.json (support_page.py).
Exit status 1 if a compiler died or did not finish, or if something could not be traced, of which
nothing is recorded.
"""

import argparse
import sys

import own_checkout  # noqa: F401
import support_page
from layer_samples import LAYER_SAMPLES

from slipstream.compiler.arch import ARCHS, named
from slipstream.compiler.compile_worker import TIMEOUT
from slipstream.tools.catalog import REPRESENTATIVE, chosen
from slipstream.tools.matrix_run import MatrixRun
from slipstream.tools.variant_cover import VARIANTS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operators", nargs="*", help="names such as kda; without any, every kernel")
    parser.add_argument("--arch", help="such as sm_80,sm_90; by default all")
    parser.add_argument("--triton", help="releases, such as 3.6.0,3.7.1; by default the one here")
    parser.add_argument("--jobs", type=int, default=2, help="how many compilers run at once")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a compiler")
    parser.add_argument("--variants", default="auto", help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--check", action="store_true", help="compile alone, record nothing")
    args = parser.parse_args(argv)
    samples = [*chosen(args.operators), *([] if args.operators else LAYER_SAMPLES)]
    archs = [named(x).name for x in args.arch.split(",")] if args.arch else list(ARCHS)
    run = MatrixRun(samples, REPRESENTATIVE, archs, True, args.variants)
    bad = False
    for release in args.triton.split(",") if args.triton else [None]:
        rows = run.compile(release, args.jobs, args.timeout, args.all)
        bad |= any(x.status in ("crash", "hang") for x in rows)
        if run.failures:
            print("not recorded: what could not be traced is missing", file=sys.stderr)
            return 1
        if not args.check:
            support_page.record(rows, run, whole=not args.operators)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

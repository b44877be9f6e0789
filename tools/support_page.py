"""docs/SUPPORT.md and verified.json: what runs of the matrix found, as matrix.py records it.

Runs of different releases add up in docs/support.json, from which SUPPORT.md is written. In memory
that is release -> architecture -> {"ptxas", "variants", "shapes", "kernels", "date", "operators"},
the last operator -> [status, reason]. In the file each reason is there once and has a number, 0 for
none, and an operator's cells of one release are one line.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from own_checkout import ROOT

from slipstream.compiler import compiler_state, source_digest, support_matrix
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.known_bugs import applying, version
from slipstream.runtime.files import write_text
from slipstream.tools.catalog import OPERATORS, REPRESENTATIVE

Data = dict[str, dict[str, dict[str, Any]]]
DATA, PAGE = ROOT / "docs/support.json", ROOT / "docs/SUPPORT.md"
VERIFIED = ROOT / "slipstream/compiler/verified.json"
# before the reason of an operator that is slow with float32 inputs alone
FLOAT32 = "float32: "


def read(path: Path) -> Data:
    """Empty if there is no such file."""
    if not path.exists():
        return {}
    file = json.loads(path.read_text())
    reasons = ["", *file["reasons"]]
    data: Data = {}
    for release, found in file["releases"].items():
        data[release] = {x: {**about, "operators": {}} for x, about in found["compilers"].items()}
        for operator, cells in found["operators"].items():
            for arch, cell in cells.items():
                status, _, number = cell.partition(" ")
                reason = reasons[int(number or 0)]
                data[release][arch]["operators"][operator] = [status, reason]
    return data


def write(path: Path, data: Data) -> None:
    reasons: dict[str, int] = {"": 0}
    releases = {}
    for release, archs in sorted(data.items()):
        compilers = {
            x: {k: y for k, y in known.items() if k != "operators"} for x, known in archs.items()
        }
        operators: dict[str, dict[str, str]] = {}
        for arch, known in sorted(archs.items()):
            for name, (status, reason) in sorted(known["operators"].items()):
                number = reasons.setdefault(reason, len(reasons))
                cell = f"{status} {number}" if number else status
                operators.setdefault(name, {})[arch] = cell
        releases[release] = {"compilers": compilers, "operators": operators}
    write_text(path, _text({"reasons": list(reasons)[1:], "releases": releases}, 4) + "\n")


def _text(value: Any, depth: int) -> str:
    """As json.dumps has it, with a line for each entry down to a depth."""
    if not value or depth == 0 or not isinstance(value, (dict, list)):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_text(x, 0) for x in value) + "\n]"
    entries = (f"{json.dumps(k)}: {_text(x, depth - 1)}" for k, x in sorted(value.items()))
    return "{\n" + ",\n".join(entries) + "\n}"


def by_operator(rows: Iterable[support_matrix.Row]) -> dict[str, dict[str, tuple[str, str]]]:
    """operator -> architecture -> the worst status of its kernels, with its reason."""
    table: dict[str, dict[str, list[support_matrix.Row]]] = {}
    for row in rows:
        for operator in row.operators:
            table.setdefault(operator, {}).setdefault(row.arch, []).append(row)
    return {x: {arch: _worst(of) for arch, of in y.items()} for x, y in table.items()}


def _worst(rows: Sequence[support_matrix.Row]) -> tuple[str, str]:
    worst = max(rows, key=lambda x: support_matrix.STATUSES.index(x.status))
    slow = {x.dtype for x in rows if x.status == "slow"}
    single = worst.status == "slow" and slow == {"fp32"} != {x.dtype for x in rows}
    return worst.status, FLOAT32 + worst.reason if single else worst.reason


def record(rows: Sequence[support_matrix.Row], run: Any, whole: bool = True) -> None:
    """Adds the rows of a MatrixRun to docs/support.json and writes what is made from it. Without
    the whole of the operators only the cells of some change, and no family of kernels becomes
    verified."""
    data = read(DATA)
    for (release, arch), without in run.without.items():
        found = [x for x in rows if (x.triton, x.arch) == (release, arch)]
        cells = {k: v[arch] for k, v in by_operator(found).items()}
        cells |= {k: ("torch", v) for k, v in without.items()}
        about = {
            "ptxas": found[0].ptxas if found else "",
            "variants": run.variants[arch],
            "shapes": len(run.shapes),
            "kernels": len(found),
            "date": date.today().isoformat(),
        }
        known = data.setdefault(release, {}).setdefault(arch, about | {"operators": {}})
        known |= {**about, "operators": {}} if whole else {}
        known["operators"] |= cells
    write_data(data)
    _record_verified(rows, whole)


def write_data(data: Data) -> None:
    """Writes docs/support.json, and docs/SUPPORT.md from it."""
    write(DATA, data)
    write_text(PAGE, page(read(DATA)))


def _record_verified(rows: Sequence[support_matrix.Row], whole: bool) -> None:
    """Writes down the families of kernels that came out sound, with digests of their sources; those
    that did not are verified no longer."""
    trusted = {
        (x["arch"], x["triton"], x["ptxas"]): x["families"]
        for x in json.loads(VERIFIED.read_text())
    }
    for compiler, families in verified(rows).items():
        now = compiler_state.families(compiler_state.uses_gluon(*compiler[:2]))
        if whole:
            trusted[compiler] = {x: now[x] for x in sorted(families)}
        elif compiler in trusted:
            of = (x for x in rows if (x.arch, x.triton, x.ptxas) == compiler)
            unsound = {compiler_state.family_of(x.module) for x in of} - families
            trusted[compiler] = {k: v for k, v in trusted[compiler].items() if k not in unsound}
    write_verified(trusted)


def verified(rows: Sequence[support_matrix.Row]) -> dict[tuple[str, str, str], set[str]]:
    """(arch, Triton, ptxas) -> the families of whose kernels none died, hung or was refused."""
    families: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        family = compiler_state.family_of(row.module)
        families.setdefault((row.arch, row.triton, row.ptxas), set()).add(family)
    for row in rows:
        if support_matrix.STATUSES.index(row.status) > 1:
            families[row.arch, row.triton, row.ptxas].discard(compiler_state.family_of(row.module))
    return families


def write_verified(families: Mapping[tuple[str, str, str], Mapping[str, str]]) -> None:
    """Writes compiler/verified.json: (arch, Triton, ptxas) -> family -> digest, of families that
    exist; and beside it the digests of the kernels as they are, which are not made again then."""
    now = compiler_state.families()
    rows = [
        {
            **dict(zip(("arch", "triton", "ptxas"), key)),
            "families": {name: digest for name, digest in families[key].items() if name in now},
        }
        for key in sorted(families)
    ]
    lines = ",\n".join(json.dumps(x) for x in rows)
    write_text(VERIFIED, f"[\n{lines}\n]\n")
    found: dict[str, str] = {}
    for gluon in (True, False):
        keys = source_digest.contents_of(compiler_state.files_of(gluon))
        digests = compiler_state.families(gluon)
        found |= {key: digests[name] for name, key in keys.items()}
    text = json.dumps(found, indent=0, sort_keys=True)
    write_text(VERIFIED.with_name(source_digest.PACKAGED.name), f"{text}\n")
    compiler_state.verified.cache_clear()


def page(data: dict) -> str:
    """The text of docs/SUPPORT.md."""
    footnotes: list[str] = []
    lines = [_HEAD]
    everything = [cells["operators"] for archs in data.values() for cells in archs.values()]
    names = sorted({name for cells in everything for name in cells})
    plain = [x for x in names if all(y[x][0] == "torch" for y in everything if x in y)]
    for release in sorted(data, key=version, reverse=True):
        archs = [x for x in ARCHS if x in data[release]]
        lines += [f"\n## Triton {release}\n", f"| operator | {' | '.join(archs)} |"]
        lines.append("|---" * (len(archs) + 1) + "|")
        here = {name for x in archs for name in data[release][x]["operators"]}
        for name in (x for x in names if x in here and x not in plain):
            row = [_cell(data[release][x], x, release, name, footnotes) for x in archs]
            lines.append(f"| {name} | {' | '.join(row)} |")
        known = [(x, data[release][x]) for x in archs]
        ptxas = ", ".join(f"{x} {y['ptxas']}" for x, y in known if y["ptxas"])
        counts = ", ".join(f"{x} {y['kernels']} ({_chosen(y)})" for x, y in known)
        lines.append(f"\nptxas: {ptxas or 'none'}. Kernels compiled: {counts}.")
        dated = [(y["date"], x) for x, y in known if "date" in y]
        days = {day: [x for other, x in dated if other == day] for day, _ in sorted(dated)}
        said = "; ".join(f"{day}: {', '.join(here)}" for day, here in days.items())
        lines += [f"\nRecorded {said}."] if days else []
    lines.append("\n## Notes\n")
    lines += [f"{i}. {x}" for i, x in enumerate(footnotes, 1)]
    lines.append("\n## In plain torch everywhere\n")
    lines += [f"- {x}: {next(y[x][1] for y in everything if x in y)}" for x in plain] or ["None."]
    unknown = sorted({x.op for x in OPERATORS} - set(names))
    if unknown:
        lines.append("\n## Not recorded yet\n")
        lines += [f"- {x}" for x in unknown]
    return "\n".join(lines) + "\n"


def _chosen(known: dict) -> str:
    """Which variants, of how many shapes if not of all that are usual."""
    shapes = known.get("shapes", len(REPRESENTATIVE))
    fewer = f", {shapes} shapes" if shapes != len(REPRESENTATIVE) else ""
    return known["variants"] + fewer


def _cell(known: dict, arch: str, release: str, name: str, footnotes: list[str]) -> str:
    """One operator's, with the number of its note."""
    if name not in known["operators"]:
        return ""
    status, reason = known["operators"][name]
    applies = applying(arch, release, known["ptxas"] or None)
    avoided = [x.name for x in applies if x.avoided]
    if status in ("ok", "slow") and avoided:
        reason += f"{'; ' if reason else ''}with workarounds for {', '.join(avoided)}"
    if reason.startswith(FLOAT32):
        status, reason = f"{status} in float32", reason.removeprefix(FLOAT32)
    if not reason:
        return status
    reason = _general(reason)
    if reason not in footnotes:
        footnotes.append(reason)
    return f"{status} [{footnotes.index(reason) + 1}]"


def _general(reason: str) -> str:
    """A reason without the figures of one kernel, so that notes stay few."""
    return "; ".join("spills" if x.startswith("spills") else x for x in reason.split("; "))


_HEAD = """# What runs where

Written by `tools/matrix.py --record` ([the matrix](dev/matrix.md)): every kernel of
every operator, forward and backward, for sample shapes, compiled ahead of time without a GPU. The
status of an operator is that of its worst kernel.

- ok: compiles, fits into shared memory, hardly spills, uses the tensor cores.
- slow: compiles and fits, and runs slower than it could, for the reason noted. The kernels of other
  dtypes, widths and back ends may be ok; `slipstream explain` names those of a call. "slow in
  float32": only with float32 inputs.
- refused: the compiler refuses it or it does not fit; the operator runs in plain torch there.
- crash, hang: the compiler dies or does not finish.
- torch: no kernel takes it there, plain torch does.
- empty: the operator is newer than the record. `slipstream precompile NAME --arch ARCH` compiles
  it.

Under each table are the days on which its columns were recorded. Kernels may have changed since
then, so that a cell may be out of date; those that have changed compile in a child process first.
[slipstream doctor](tools/doctor.md) says which they are with the Triton that is installed, and
lists the faults of compilers that the notes name.

The word beside a count of kernels says which of a kernel's variants were compiled:

- flags: a selection that has every value of every flag;
- pairs: a selection that has every pair of values;
- few: one for every operator and dtype;
- all: all variants of the sample shapes. "2 shapes": only of the first two sample shapes."""

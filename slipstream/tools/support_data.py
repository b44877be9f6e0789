"""docs/support.json: what the runs of the matrix found, from which docs/SUPPORT.md is written.

In memory: release -> architecture -> {"ptxas", "variants", "shapes", "kernels", "date",
"operators"}, the last operator -> [status, reason]. In the file each reason is there once and has a
number, 0 for none, and an operator's cells of one release are one line.
"""

import json
from pathlib import Path
from typing import Any

from slipstream.runtime.files import write_text

Data = dict[str, dict[str, dict[str, Any]]]


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

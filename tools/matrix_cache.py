"""Rows of earlier runs of the matrix, so that one compiles again only what has changed.

A row holds for a job, the source of its kernel and of the functions that this calls, and the
compilers. They lie in matrix/ in Slipstream's cache folder, a file for each set of compilers, a
line for each row, of which the last one counts. Where the compiler has made nothing, none is kept:
a broken installation of it raises as one that refuses the kernel.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import own_checkout  # noqa: F401

from slipstream.compiler.aot import Job, load
from slipstream.compiler.compiler_state import cache_dir
from slipstream.compiler.support_matrix import Row, Task, as_json, dtype_of


class RowCache:
    """Those under the compilers that `about` (of a Worker) names; none if `anew`."""

    def __init__(self, about: Mapping[str, str], recompile: bool = False) -> None:
        name = "-".join([about["triton"], about["ptxas"], about["ptxas_blackwell"]])
        self._path = cache_dir() / "matrix" / f"{name}.jsonl"
        self._digests: dict[str, str] = {}
        self._known: dict[str, Any] = {}
        text = self._path.read_text() if self._path.exists() else ""
        if not text.endswith("\n") and text:
            self._write("")  # a run was cut off in the middle of a line
        if not recompile:
            lines = map(_read, text.split("\n"))
            known = (x for x in lines if x is not None and x["row"]["instructions"] is not None)
            self._known = {x["digest"]: x["row"] for x in known}

    def known(self, job: Job) -> bool:
        return self._digest(job) in self._known

    def split(self, tasks: Iterable[Task]) -> tuple[list[Row], list[Task]]:
        """Rows that still hold, with the operators of now, and what has to be compiled."""
        rows, rest = [], []
        for job, operators in tasks:
            digest = self._digest(job)
            if digest in self._known:
                # not all that a file has say their dtype
                now = {"operators": operators, "dtype": dtype_of(job)}
                rows.append(Row(**{**self._known[digest], **now}))
            else:
                rest.append((job, operators))
        return rows, rest

    def add(self, job: Job, row: Row) -> None:
        """Writes down a row of what `split` said had to be compiled."""
        if row.instructions is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(json.dumps({"digest": self._digest(job), "row": as_json(row)}))

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def _digest(self, job: Job) -> str:
        if job.key not in self._digests:
            text = f"{job.key} {load(job.kernel).cache_key}"
            self._digests[job.key] = hashlib.sha1(text.encode()).hexdigest()
        return self._digests[job.key]


def _read(line: str) -> Any:
    """A row; None of half a line."""
    try:
        return json.loads(line)
    except ValueError:
        return None

"""A process that has imported the package under Triton's interpreter, and forks for each script.

The interpreter is chosen when a kernel is defined, so such scripts run in processes of their own;
forks of one that has torch and Triton start at once.

python -m tests.support.forked        reads a line of JSON for each script: its name and arguments
"""

import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.support import quick_interpreter

ROOT = Path(__file__).parents[2]


@functools.cache
def _server() -> subprocess.Popen:
    """Ends when its stdin is closed, with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_script(script: str, *arguments: str) -> tuple[int, str]:
    """The exit status of `python -m script arguments`, and what it printed."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps([script, *arguments]) + "\n")
        server.stdin.flush()
        status, text = json.loads(server.stdout.readline())
    except BaseException:  # a timeout, too: the next script shall not get this one's reply
        server.kill()
        _server.cache_clear()
        raise
    return status, text


def _in_child(script: str, arguments: list[str], output: int) -> None:
    """Never returns."""
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        code: Any = ended.code
        status = code if isinstance(code, int) else int(code is not None)
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    for name in ("pytest", "tests.support.operators"):
        importlib.import_module(name)
    quick_interpreter.install()
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _in_child(script, arguments, output.fileno())
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read()
        replies.write(json.dumps([os.waitstatus_to_exitcode(status), text]) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()

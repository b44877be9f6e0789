"""Processes that have imported what scripts need, and fork for each of them: a fork starts at once.

One has the package under Triton's interpreter, which is chosen when a kernel is defined; one has
torch alone, for code that wants to import the package itself.

python -m tests.support.forked        reads a line of JSON for each script: how it is to be run
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)  # that of all tests: one may have its own when a server starts
# what is imported before the forks, by kind
PRELOADED = {"interpreter": ("pytest", "tests.support.operators"), "torch": ("torch",)}
OF_KIND = {"interpreter": {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, "torch": {}}


@functools.cache
def _server(kind: str) -> subprocess.Popen:
    """Ends when its stdin is closed, with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", kind],
        env={**ENVIRONMENT, **OF_KIND[kind], "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _reply(kind: str, env: Mapping[str, str] | None, **request: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    request["env"] = {**(os.environ if env is None else env), **OF_KIND[kind]}
    server = _server(kind)
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status, out, error = json.loads(server.stdout.readline())
    except BaseException:  # a timeout, too: the next script shall not get this one's reply
        server.kill()
        _server.cache_clear()
        raise
    return status, out, error


def run_script(script: str, *arguments: str) -> tuple[int, str]:
    """Status of `python -m script arguments` under the interpreter, and what it printed."""
    status, out, error = _reply("interpreter", None, script=script, arguments=arguments)
    return status, out + error


def run_test(module: str, name: str, given: Mapping[str, Any]) -> tuple[int, str]:
    """Status of a decorated test's own function under the interpreter, and what it printed."""
    status, out, error = _reply("interpreter", None, module=module, test=name, given=given)
    return status, out + error


def run_code(
    code: str | Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """`python -c code arguments`, or of a path `python FILE arguments`; torch is there at once."""
    words = [str(x) for x in arguments]
    status, *texts = _reply("torch", env, code=str(code), arguments=words)
    return subprocess.CompletedProcess([sys.executable, str(code), *words], status, *texts)


def _in_child(request: dict[str, Any], outputs: tuple[int, int]) -> None:
    """Never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(request["env"])
        if "script" in request:
            sys.argv = [request["script"], *request["arguments"]]
            runpy.run_module(request["script"], run_name="__main__", alter_sys=True)
        elif "test" in request:
            import torch

            torch.manual_seed(int(os.environ.get("SEED", "0")))
            torch.use_deterministic_algorithms(True)  # NaN in whatever is never written
            module = importlib.import_module(request["module"])
            getattr(module, request["test"]).__wrapped__(**request["given"])
        elif request["code"].endswith(".py"):
            sys.argv = [request["code"], *request["arguments"]]
            sys.path[0] = str(Path(request["code"]).parent)
            runpy.run_path(request["code"], run_name="__main__")
        else:
            sys.argv = ["-c", *request["arguments"]]
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        code: Any = ended.code
        status = code if isinstance(code, int) else int(code is not None)
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as a process of its own would
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    checks = ExitStack()
    for name in PRELOADED[sys.argv[1]]:
        importlib.import_module(name)
    if sys.argv[1] == "interpreter":
        from tests.support import quick_interpreter
        from tests.support.in_bounds import in_bounds
        from tests.support.in_order import in_order

        quick_interpreter.install()
        # in every script, as long as this runs
        checks.enter_context(in_bounds(corners=True))
        checks.enter_context(in_order())
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            child = os.fork()
            if child == 0:
                _in_child(json.loads(line), (out.fileno(), error.fileno()))
            _, status = os.waitpid(child, 0)
            texts = []
            for output in (out, error):
                output.seek(0)
                texts.append(output.read())
        replies.write(json.dumps([os.waitstatus_to_exitcode(status), *texts]) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()

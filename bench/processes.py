"""Work of a script in processes of its own, side by side, of which each tells JSON lines.

A function that is looked up when a module is imported (fla's in transformers' models) is another in
another process, and compilers of several processes use several cores.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from queue import Queue
from typing import Any

import torch


def tell(**cells: Any) -> None:
    """From a process to who started it."""
    print(json.dumps(cells), flush=True)


def gpus() -> list[str]:
    """Names of those that are visible, as CUDA_VISIBLE_DEVICES has them."""
    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


class Child:
    """`python SCRIPT --child ARGUMENTS`, on one of the GPUs; what it tells comes to `told`.

    number: of the GPU, modulo how many there are. variables: of its environment.
    """

    def __init__(self, script: str, arguments: Sequence[str], number: int = 0, **variables: str):
        self.name = " ".join(arguments)
        self.gpu = 0
        env = {"OMP_NUM_THREADS": "2", **os.environ, **variables}
        if names := gpus():
            self.gpu = number % len(names)
            env["CUDA_VISIBLE_DEVICES"] = names[self.gpu]
        run, pipe = [sys.executable, script, "--child", *arguments], subprocess.PIPE
        self.process = subprocess.Popen(
            run, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self.told: Queue[dict[str, Any] | None] = Queue()
        self.errors: list[str] = []
        reads = (self._read, self._read_errors)
        self.threads = [threading.Thread(target=f, daemon=True) for f in reads]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.told.put(json.loads(line))
        self.told.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def say(self, line: str = "go") -> None:
        """To a process that waits for a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed, which failure() says
            print(line, file=self.process.stdin, flush=True)

    def next(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Its next message, None at its end; queue.Empty if none comes within the seconds."""
        told = self.told.get(timeout=seconds)
        if told is None:
            self.told.put(None)  # for who asks again
        return told

    def failure(self) -> str:
        """The last lines of a process that failed; "" of one that ended well."""
        code = self.process.wait()
        return "" if code == 0 else f"rc {code}: {' '.join(''.join(self.errors[-3:]).split())}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def take_first_tiles() -> None:
    """Triton's autotuners of kernels that are defined later take one of their tiles untried."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    begin: Any = Autotuner.__init__

    def with_one(
        self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any
    ) -> None:
        # four warps and few stages run anywhere
        best = sorted(configs, key=lambda c: (abs(c.num_warps - 4), c.num_stages))[:1]
        begin(self, fn, arg_names, best, *rest, **options)

    Autotuner.__init__ = with_one

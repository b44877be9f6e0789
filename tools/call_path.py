"""How far it is from a public function to its kernels: Python frames, and files of this package.

    python tools/call_path.py            prints a table
    python tools/call_path.py --check    exit status 1 if a path is longer than LIMITS says

The first call of a shape runs on fake tensors of an H100, as in compiler/trace.py, and every call
into slipstream/ is counted by a profiler hook. Frames are those on the stack when a kernel is
launched, the most of any launch of the call; files are those in which some function ran. A call
like an earlier one checks nothing again, and from the third on its launches are played from a
record (runtime/call_replay.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import own_checkout  # noqa: F401
import torch

import slipstream
from slipstream import ops
from slipstream.compiler.trace import trace
from slipstream.runtime import backends

PACKAGE = str(Path(slipstream.__file__).parent)
ARCH = "sm_90"
# What is not the path: the public function's argument checks and everything that only traces.
TRACING = ("compiler/trace.py", "compiler/aot.py", "compiler/known_bugs.py")


def gated_delta_rule(device: torch.device) -> Any:
    q, k, v = _tensors(device, 3, 2, 1024, 4, 128)
    g, beta = _gate(device, 2, 1024, 4), _gate(device, 2, 1024, 4)
    return ops.chunk_gated_delta_rule(q, k, v, g, beta)


def kda(device: torch.device) -> Any:
    q, k, v = _tensors(device, 3, 2, 1024, 4, 128)
    return ops.chunk_kda(q, k, v, _gate(device, 2, 1024, 4, 128), _gate(device, 2, 1024, 4))


def attention(device: torch.device) -> Any:
    return ops.attention(*_tensors(device, 3, 2, 1024, 4, 128), causal=True)


def rms_norm(device: torch.device) -> Any:
    (x,), (weight,) = _tensors(device, 1, 64, 1024), _tensors(device, 1, 1024)
    return ops.rms_norm(x, weight)


CALLS = {
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": kda,
    "attention": attention,
    "rms_norm": rms_norm,
}
# (frames, files), forward and forward with backward.
LIMITS = {
    "chunk_gated_delta_rule": ((8, 19), (9, 20)),
    "chunk_kda": ((8, 20), (9, 20)),
    "attention": ((8, 19), (9, 20)),
    "rms_norm": ((8, 13), (9, 14)),
}


def measure(call: Callable[[torch.device], Any], backward: bool) -> tuple[int, int]:
    """Frames to the furthest launch, and files, of a call whose kernels are all imported."""
    files: set[str] = set()
    frames = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal frames
        if event != "call":
            return
        path = frame.f_code.co_filename
        if _counts(path):
            files.add(path)
        elif frame.f_code.co_name == "record_job":
            frames = max(frames, _depth(frame))

    def watched(device: torch.device) -> None:
        sys.setprofile(watch)
        call(device)

    with as_plain_calls():
        trace(call, ARCH, backward=backward)
        try:
            trace(watched, ARCH, backward=backward)
        finally:
            sys.setprofile(None)
    return frames, len(files)


@contextmanager
def as_plain_calls() -> Iterator[None]:
    """Has every module that asks take fake tensors for real ones that nobody looks at."""
    asked = backends.is_plain_call
    name = asked.__name__
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if vars(module).get(name) is asked:
                stack.enter_context(mock.patch.object(module, name, return_value=True))
        yield


def _counts(path: str) -> bool:
    return path.startswith(PACKAGE) and not path.endswith(TRACING)


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += _counts(frame.f_code.co_filename)
        frame = frame.f_back
    return depth


def _tensors(device: torch.device, count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]


def _gate(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check, over = parser.parse_args().check, []
    print(f"{'':24}{'forward':>18}{'with backward':>18}\n{'':24}" + f"{'frames files':>18}" * 2)
    for name, call in CALLS.items():
        found = measure(call, False), measure(call, True)
        print(f"{name:24}" + "".join(f"{a:>12}{b:>6}" for a, b in found))
        limit = LIMITS[name]
        if any(x > y for pair, most in zip(found, limit) for x, y in zip(pair, most)):
            over.append(f"{name}: {found}, at most {limit}")
    if check and over:
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()

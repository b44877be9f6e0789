"""The cost and the modules of `import slipstream`."""

from pathlib import Path

from tests.support.forked import run_code

COUNT = """
import gc, sys, time
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
gc.collect()  # what torch has left to collect is not ours
start = time.process_time()
import slipstream
print(time.process_time() - start)
print([name for name in ("triton", "transformers", "numpy.testing") if name in sys.modules])
"""


def test_import_is_light_and_quick(tmp_path: Path) -> None:
    """Best of three, as installed: neither triton nor transformers, and beyond torch less than
    0.3 s of a processor, which others on the machine do not lengthen as they do a wait.

    A process before them writes bytecode, as installing does: compiling over a hundred files anew
    is not what an import costs, and where these tests run nothing may have been written.
    """
    seconds = []
    for _ in range(4):
        done = run_code(COUNT, tmp_path)  # torch is there
        assert done.returncode == 0, done.stderr
        out = done.stdout.splitlines()
        assert out[1] == "[]"
        seconds.append(float(out[0]))
    assert min(seconds[1:]) < 0.3

"""What `import slipstream` costs and brings."""

import subprocess
import sys

COUNT = """
import sys, time
import torch
start = time.perf_counter()
import slipstream
print(time.perf_counter() - start)
print([name for name in ("triton", "transformers", "numpy.testing") if name in sys.modules])
"""


def test_import_is_light_and_quick() -> None:
    """Best of three: neither triton nor transformers, and less than 0.3 s beyond torch."""
    seconds = []
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert out[1] == "[]"
        seconds.append(float(out[0]))
    assert min(seconds) < 0.3

#!/bin/sh
# triton 3.6.0 with its two assemblers, ptxas 12.8.93 and 12.9.86; for sm_90, without a GPU.
#
# Half of the accumulators of one warpgroup product go on as those of a second, narrower one, which
# are the registers they lie in already. ptxas then waits after every wgmma of the function, as
# "insufficient register resources for the wgmma pipeline", with 42 of 255 registers in use. Summed
# from zero and added afterwards, with more registers, nothing is serialized.
# Seen: C7511 for the first kernel alone, by both assemblers.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
cat > "$dir/halves.py" <<'EOF'
import re, subprocess, sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import hopper

@gluon.jit
def halves(x_ptr, o_ptr, GOES_ON: gl.constexpr):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    i = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] * 64
    x.store(gl.load(x_ptr + i + gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]))
    hopper.fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([64, 32], gl.float32, wide)
    both = hopper.warpgroup_mma(x, x.slice(0, 32).permute((1, 0)), zero, is_async=True)
    both = hopper.warpgroup_mma_wait(0, deps=(both,))
    one, two = gl.split(gl.permute(gl.reshape(both, [64, 2, 16]), (0, 2, 1)))
    one = gl.convert_layout(one, narrow, assert_trivial=True)
    two = gl.convert_layout(two, narrow, assert_trivial=True)
    start = two if GOES_ON else gl.zeros([64, 16], gl.float32, narrow)
    y = hopper.warpgroup_mma(x, x.slice(32, 16).permute((1, 0)), start, is_async=True)
    y = hopper.warpgroup_mma_wait(0, deps=(y,))
    if not GOES_ON:
        y += two
    i = gl.arange(0, 64, gl.SliceLayout(1, narrow))[:, None] * 16
    gl.store(o_ptr + i + gl.arange(0, 16, gl.SliceLayout(0, narrow))[None, :], y * one)


assemblers = Path(triton.__file__).parent / "backends/nvidia/bin"
for goes_on in (True, False):
    types = {"x_ptr": "*bf16", "o_ptr": "*fp32", "GOES_ON": "constexpr"}
    source = GluonASTSource(halves, types, {(2,): goes_on})
    file = Path(sys.argv[1], "halves.ptx")
    file.write_text(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
    for name in "ptxas", "ptxas-blackwell":
        command = [assemblers / name, "-v", "-arch=sm_90a", file, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        used = int(re.search(r"Used (\d+) registers", said)[1])
        why = re.findall(r"\(C\d+\).*serialized due to ([a-z ]+) in", said)
        print(name, "goes on" if goes_on else "added", used, "registers", why)
        assert used < 64
        assert why == (["insufficient register resources for the wgmma pipeline"] if goes_on else [])
EOF
python3 -m pip install -q --no-compile --no-deps --target "$dir/lib" triton==3.6.0
PYTHONPATH="$dir/lib" python3 "$dir/halves.py" "$dir"

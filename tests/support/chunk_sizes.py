"""Sizes of calls that have to share their kernels."""

from slipstream.tools.catalog import SAMPLES

# Samples of X or Y heads have a fixed number; the others take X's kernels with many programs.
# The scan of hgrn has a kernel for one sequence alone, which others take too.
SCANNING = ("chunk_hgrn", "chunk_mamba3")
FIXED = ("q=BTX", "q=BTY")
CHUNKED = [
    x
    for x in SAMPLES
    if x.op.startswith("chunk_") and not (x.op.startswith(SCANNING) or x.tensors.startswith(FIXED))
]

WAYS = {
    "few programs": ((2, 300, 16), (1, 301, 33), (7, 64, 5), (1, 1, 1)),
    "many programs": ((1, 200, 128), (5, 99, 70), (2, 150, 80)),
    "split": ((1, 32768, 4), (1, 30001, 4), (2, 32000, 2)),
    "rows": ((2, 8000, 64), (2, 8050, 66), (2, 8100, 65)),
    "many heads": ((1, 8192, 94), (1, 12345, 90), (1, 9000, 80)),
    "one scan back": ((1, 8192, 96), (1, 12345, 100), (1, 9000, 128)),
}

PACKED = {
    "few heads": ((4, 133, 8), (16, 10, 2), (3, 64, 7)),
    "more heads": ((2, 300, 20), (3, 133, 20), (2, 64, 30)),
}

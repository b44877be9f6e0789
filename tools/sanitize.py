"""Every operator under compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py --only chunk_gla

Odd sizes, packed sequences and states, strong gates, forward and backward; heads of 128 take the
kernels for sm_90. Every tensor has memory of its own, so that an access beyond its end is seen. The
sanitizer slows kernels down a hundredfold: a few operators at a time. racecheck needs
--num-cuda-barriers 64, and of kernels whose warps have parts still reports what one part stores and
another loads, since an arrival speaks for one thread there: tests/gluon_emulator/race_detector.py
checks those.

For what another ptxas makes of the kernels: TRITON_PTXAS_PATH=... slipstream doctor.
"""

import argparse
import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch is imported

import own_checkout  # noqa: F401
import torch

from slipstream.tools.catalog import Shape, chosen, flat

SIZES = {
    "whole": Shape(B=1, T=130, state=True),
    "packed": Shape(B=2, T=70, packed=True, grouped=True, state=True),
    "long": Shape(B=1, T=2300, H=1),
    "narrow": Shape(B=1, T=130, K=64, V=64, state=True),
    "odd": Shape(B=2, T=70, K=60, V=64, packed=True, grouped=True, state=True),
}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", default=re.compile(""), type=re.compile, metavar="REGEX")
    arguments.add_argument("--impl")
    arguments.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    options = arguments.parse_args(argv)
    torch.manual_seed(0)
    launched: Counter[str] = Counter()
    with contextlib.suppress(ImportError):
        from triton import knobs

        hook: Any = knobs.runtime.launch_enter_hook
        hook.add(lambda metadata: launched.update([metadata.get()["name"]]))
    for sample in (x for x in chosen(None) if options.only.search(x.name)):
        for name in options.sizes:
            for gate in ("weak", "mixed") if ":gate" in sample.tensors else ("weak",):
                args = sample.inputs(replace(SIZES[name], gate=gate), DEVICE)
                for given, x in args.items():
                    if x.is_floating_point() and given not in sample.fixed.split():
                        x.requires_grad_()
                outs = flat(sample.call(args, options.impl))
                outs = [x for x in outs if x.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.randn_like(x) for x in outs])
        print(sample.name, "ran", flush=True)
    print("launched", ", ".join(sorted(launched)))


if __name__ == "__main__":
    main()

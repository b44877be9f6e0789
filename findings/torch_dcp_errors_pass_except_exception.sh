#!/bin/sh
# torch 2.13.0 on a CPU.
#
# What torch.distributed.checkpoint.load raises (a key that the checkpoint lacks, another shape) is a
# CheckpointException, which derives from BaseException, like KeyboardInterrupt. `except Exception`
# around a load, such as a fallback to older checkpoints, does not see it, although the cause that its
# text names is a RuntimeError or a ValueError.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import warnings
import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
dcp.save({"w": torch.ones(3)}, checkpoint_id="saved", no_dist=True)


def load():
    try:
        dcp.load({"w": torch.zeros(3), "b": torch.zeros(3)}, checkpoint_id="saved", no_dist=True)
    except Exception:
        return "fallback"


try:
    load()
except BaseException as error:
    passed, text = type(error), str(error).strip().splitlines()[-1]
print(passed.__mro__, text)
assert passed.__name__ == "CheckpointException" and not issubclass(passed, Exception)
assert "RuntimeError: Missing key" in text
EOF

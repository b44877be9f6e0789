#!/bin/sh
# torch 2.13.0 on a CPU.
#
# torch.distributed.checkpoint.load checks shapes, and not dtypes: a float32 checkpoint is loaded into
# whatever the module has, without a word, integers included. 300.0 becomes 44 and -1.7 becomes -1 in
# an int8 tensor. Someone who loads plain weights into a model that was quantized before gets noise.
# (load_state_dict of a Module casts, too; a checkpoint format would be expected to know better, as
# it stores the dtype and refuses another shape.)
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
dcp.save({"w": torch.tensor([0.7, -1.7, 300.0])}, checkpoint_id="saved", no_dist=True)
state = {"w": torch.zeros(3, dtype=torch.int8)}
dcp.load(state, checkpoint_id="saved", no_dist=True)
stored = dcp.FileSystemReader("saved").read_metadata().state_dict_metadata["w"].properties.dtype
print("stored as", stored, "loaded", state["w"].tolist(), state["w"].dtype)
assert stored == torch.float32 and state["w"].tolist() == [0, -1, 44]
EOF

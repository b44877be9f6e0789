#!/bin/sh
# onnxruntime 1.32.0 on a CPU, onnx 1.23.2, transformers 5.24.0, torch 2.13.0.
#
# GatedDeltaNet (com.microsoft) with qk_l2_norm=1 divides q and k by sqrt(sum of squares + 1e-12).
# The models that it is for were trained with 1e-6 there: transformers' l2norm of Qwen3-Next, as fla.
# Its documentation names no epsilon. A key of norm 1e-3 has norm 0.71 in the model and 1 in the
# runtime, one of norm 1e-4 has 0.1 and 1: what the model all but ignores is written in full.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" onnxruntime==1.32.0 onnx==1.23.2 \
  transformers==5.24.0 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

K, V = 16, 8
names = ["q", "k", "v", "", "g", "b", "s"]
shapes = {"q": (1, 1, K), "k": (1, 1, K), "v": (1, 1, V), "g": (1, 1), "b": (1, 1), "s": (1, 1, V, K)}


def written(k: np.ndarray) -> float:
    """Norm of the key that one token of beta 1 and values 1 leaves in an empty state."""
    node = helper.make_node("GatedDeltaNet", names, ["o", "f"], domain="com.microsoft", qk_l2_norm=1)
    infos = [helper.make_tensor_value_info(x, TensorProto.FLOAT, y) for x, y in shapes.items()]
    outs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, None) for x in "of"]
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", infos, outs)
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {x: np.zeros(y, np.float32) for x, y in shapes.items()}
    given |= {"q": k, "k": k, "v": np.ones((1, 1, V), np.float32), "b": np.ones((1, 1), np.float32)}
    return float(np.linalg.norm(run.run(None, given)[1][0, 0, 0]))


direction = np.random.default_rng(0).standard_normal((1, 1, K)).astype(np.float32)
direction /= np.linalg.norm(direction)
for norm, model in ((1.0, 1.0), (1e-3, 0.7071), (1e-4, 0.0995)):
    k = direction * np.float32(norm)
    theirs, runtimes = float(l2norm(torch.from_numpy(k)).norm()), written(k)
    print(f"key of norm {norm}: {theirs:.4f} in transformers, {runtimes:.4f} in onnxruntime")
    assert abs(theirs - model) < 1e-3 and abs(runtimes - 1) < 1e-3
EOF

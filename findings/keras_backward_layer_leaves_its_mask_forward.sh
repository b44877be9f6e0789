#!/bin/sh
# keras 3.15.1 on jax 0.10.2 (CPU); its back end of torch 2.13.0 is like it.
#
# A recurrent layer with go_backwards=True and return_sequences=True returns its outputs from the last token to the
# first, as it says. The mask that it passes on with them is the one that came in, from the first to the last. What
# follows then drops the outputs of the first tokens and reads those of the padding: a mean or a second layer
# changes with how far a text is padded, and there is no warning. The layer's own outputs are right, as is
# Bidirectional, which turns them round again, and a forward layer.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" keras==3.15.1 jax==0.10.2 numpy==2.3.5
PYTHONPATH="$dir/lib" KERAS_BACKEND=jax JAX_PLATFORMS=cpu python3 -W ignore - <<'EOF'
import keras
import numpy as np
from keras import layers

x = np.random.default_rng(0).standard_normal((2, 12, 8)).astype("float32")
padded = np.concatenate([x, np.zeros((2, 5, 8), "float32")], 1)
LAYERS = {
    "forward": lambda: layers.LSTM(6, return_sequences=True),
    "backward": lambda: layers.LSTM(6, return_sequences=True, go_backwards=True),
    "both ways": lambda: layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
}
for name, layer in LAYERS.items():
    for then in (layers.GlobalAveragePooling1D, lambda: layers.LSTM(4)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Masking(), layer(), then()])
        alone, beside = (keras.ops.convert_to_numpy(model(rows)) for rows in (x, padded))
        moved = float(np.abs(beside - alone).max())
        top = float(np.abs(alone).max())
        print(f"{name}, then {model.layers[-1].name}: outputs up to {top:.2f} move by {moved:.1e} with 5 padded tokens")
        assert moved > 0.03 if name == "backward" else moved < 1e-5
EOF

#!/bin/sh
# keras 3.15.1 on jax 0.10.2 (CPU); its back end of torch 2.13.0 is right.
#
# ConvLSTM1D and ConvLSTM2D with a mask of tokens: jax's loop keeps the mask of a step as [rows, 1] and lets it
# broadcast with states of [rows, places, channels] or [rows, height, width, channels]. The rows meet another
# dimension. A batch whose number is that dimension's (places in 1D, width in 2D) runs: masked rows go on over their
# padding, and rows without padding lose their steps at the place that has the number of a masked row, and so what
# its neighbours read. Any other number of rows raises ValueError, and one row alone is right. LSTM, whose states are
# [rows, channels], is right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" keras==3.15.1 jax==0.10.2 numpy==2.3.5
PYTHONPATH="$dir/lib" KERAS_BACKEND=jax JAX_PLATFORMS=cpu python3 -W ignore - <<'EOF'
import keras
import numpy as np
from keras import layers

T, READ = 6, 4
rng = np.random.default_rng(0)
LAYERS = {
    "LSTM": (lambda: layers.LSTM(4), ()),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(4, 3, padding="same"), (4,)),
    "ConvLSTM2D": (lambda: layers.ConvLSTM2D(4, 3, padding="same"), (5, 4)),
}
for name, (make, places) in LAYERS.items():
    keras.utils.set_random_seed(0)
    layer = make()
    for rows in (1, 3, 4):
        x = rng.standard_normal((rows, T, *places, 3)).astype("float32")
        mask = np.ones((rows, T), bool)
        mask[0, READ:] = False
        right = [layer(x[i : i + 1, : READ if i == 0 else T]) for i in range(rows)]
        right = np.concatenate([keras.ops.convert_to_numpy(row) for row in right])
        try:
            found = keras.ops.convert_to_numpy(layer(x, mask=mask))
        except ValueError:
            print(f"{name}, {rows} rows: ValueError")
            assert places and rows == 3
            continue
        off = np.abs(found - right).reshape(rows, -1).max(1)
        print(f"{name}, {rows} rows of places {places}: off by", *(f"{row:.1e}" for row in off))
        assert (off > 0.01).all() if places and rows == 4 else (off < 1e-5).all()
        if places and rows == 4:  # in rows without padding: place 0 and its neighbour
            wrong = (np.abs(found - right)[1:] > 1e-3).any((0, -1)).reshape(-1, 4).any(0)
            assert wrong.tolist() == [True, True, False, False]
EOF

"""fla.modules: norms, convolutions, rotary embeddings, losses and activations (paths.MODULES)."""

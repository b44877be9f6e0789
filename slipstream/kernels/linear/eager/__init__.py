"""The linear family in plain torch: the CPU path, chunkwise and token by token, with gradients."""

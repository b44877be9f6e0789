"""flash_attn.ops.triton: norms, rotary embeddings and cross entropy."""

"""flash_attn.ops: norms, rotary embeddings and cross entropy."""

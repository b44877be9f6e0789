"""flash_attn.layers: rotary position embeddings."""

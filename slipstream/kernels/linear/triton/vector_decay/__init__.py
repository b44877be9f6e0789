"""Linear attention with a decay per channel (GLA, RWKV-6, GSA) in Triton."""

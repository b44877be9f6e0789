"""Linear attention with a decay per channel (GLA, RWKV-6, GSA) on sm_90."""

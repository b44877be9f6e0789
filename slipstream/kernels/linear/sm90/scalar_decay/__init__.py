"""Linear attention with no decay or one decay per token and head on sm_90."""

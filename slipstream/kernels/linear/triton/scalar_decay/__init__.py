"""Linear attention with no decay or one decay per token and head in Triton."""

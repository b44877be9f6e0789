"""The gate in Triton."""

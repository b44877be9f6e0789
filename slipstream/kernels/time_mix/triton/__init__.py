"""Time mixing in Triton."""

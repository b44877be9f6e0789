"""The rotation in Triton."""

"""The vector that is erased, in Triton."""

"""Operators on single elements or tokens, and those that move tokens. A file has one operator; its
kernels and their launch are in the file of that name in triton or sm90."""

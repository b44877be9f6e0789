"""Portable Triton kernel of linear layers of a few rows."""

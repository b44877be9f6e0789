"""Queries and keys rotated by angles of their tokens, and their products (Mamba-3)."""

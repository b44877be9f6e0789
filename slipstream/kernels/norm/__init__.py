"""Norms over the last dimension: root mean square, layer, and what is built from them."""

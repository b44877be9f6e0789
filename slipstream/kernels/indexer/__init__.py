"""Indexers of selected attention: which blocks of keys a query attends to, and what trains them."""

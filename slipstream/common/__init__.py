"""Shared by all kernel families: argument checks, packing, registration, choice of a kernel."""

"""Options of the linear family that only transform inputs and results, one file each.

A mode has `into`, which changes a call on its way to the kernels, and `out`, which changes what
comes back. dispatch.py has their order, and the pairs that exclude each other.
"""

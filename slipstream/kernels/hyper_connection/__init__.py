"""Manifold-constrained hyper-connections (mHC): several residual streams around a layer."""

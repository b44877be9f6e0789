"""Device code and constants that several families of kernels share."""

"""Device code that all sm_90 kernels of the linear family share."""

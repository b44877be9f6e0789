"""The matmul for sm_90; imported only where it is chosen."""

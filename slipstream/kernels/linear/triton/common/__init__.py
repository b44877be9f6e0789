"""What the Triton kernels of the linear family share."""

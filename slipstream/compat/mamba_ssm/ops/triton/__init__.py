"""mamba_ssm.ops.triton: the scan of Mamba-2, one token of both, and the norms."""

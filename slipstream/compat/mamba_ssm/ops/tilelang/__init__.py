"""mamba_ssm.ops.tilelang: Mamba-3 with several inputs and outputs a token."""

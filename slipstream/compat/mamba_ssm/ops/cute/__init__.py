"""mamba_ssm.ops.cute: a decoding step of Mamba-3."""

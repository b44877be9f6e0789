"""mamba_ssm.ops.cute.mamba3: a decoding step of Mamba-3."""

"""mamba_ssm.modules: Mamba-3's block."""

"""mamba_ssm.ops.triton.mamba3: the recurrence of Mamba-3."""

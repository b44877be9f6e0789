"""mamba_ssm.ops.tilelang.mamba3: the recurrence of Mamba-3 MIMO."""

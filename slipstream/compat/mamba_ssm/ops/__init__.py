"""mamba_ssm.ops: the selective scan; in triton those of Mamba-2 and the norms."""

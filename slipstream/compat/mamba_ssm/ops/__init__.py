"""mamba_ssm.ops: the selective scan, the scan of Mamba-2 and Mamba-3, and the norms."""

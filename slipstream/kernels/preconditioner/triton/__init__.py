"""The preconditioner in Triton."""

"""The step of a mixer as one Triton kernel."""

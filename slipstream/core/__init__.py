"""What every kernel family shares: argument checks, packing, registration, the choice of a kernel."""

"""What every kernel family shares: argument checks, packing, registration, choice of a kernel."""

"""fla.ops.utils: offsets and indices of packed sequences, padding, sums of chunks."""

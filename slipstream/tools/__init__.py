"""What the commands do: matrix, doctor, precompile, explain. Nothing here runs in a model."""

"""The commands matrix, doctor, precompile and explain. Nothing here runs in a model."""

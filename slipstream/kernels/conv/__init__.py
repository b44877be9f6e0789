"""Depthwise causal convolution over a few tokens, whole sequences and one step."""

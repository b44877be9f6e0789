"""Operators on single tokens, and those that move tokens: rotary, activations, shift, embedding."""

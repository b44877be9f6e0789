"""Attention over the depth: of each token a mean of what earlier layers left, by their softmax."""

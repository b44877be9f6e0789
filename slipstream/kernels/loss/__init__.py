"""Losses over a vocabulary, with and without holding the logits."""

"""Log-probabilities of targets and entropies of their distributions, behind a linear layer."""

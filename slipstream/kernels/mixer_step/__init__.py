"""One token of a whole mixer: convolution, gates, recurrence on a pool of states, gated norm."""

"""What a delta rule with gates of channels erases, as a vector for each token."""

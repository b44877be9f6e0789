"""The vector that a delta rule with gates per channel erases, for each token."""

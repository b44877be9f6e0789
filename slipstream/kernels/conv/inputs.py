"""What a convolution can do to its results besides."""

# Of three tensors how many are normalised: queries and keys.
UNIT_TENSORS = 2
# Inside the root of their norms: that of ops.l2_norm.
UNIT_EPS = 1e-6
# Channels of a run that a warp has: with fewer it has too little of each row, with more it spills.
UNIT_WIDTHS = (64, 128)

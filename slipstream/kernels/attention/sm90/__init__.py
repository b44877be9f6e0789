"""Softmax attention for sm_90 in Gluon: TMA, wgmma, a producer warp and consumer warpgroups."""

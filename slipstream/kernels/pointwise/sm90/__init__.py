"""Products with a gated activation in what follows them, for sm_90; imported only when chosen."""

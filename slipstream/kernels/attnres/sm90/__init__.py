"""Attention over the depth for sm_90, in Gluon: its backward."""

"""Drafts of a mixer on sm_90, in Gluon."""

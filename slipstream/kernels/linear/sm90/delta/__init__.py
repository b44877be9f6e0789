"""The delta rule on sm_90."""

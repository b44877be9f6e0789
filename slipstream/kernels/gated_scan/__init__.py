"""Gated scans: a recurrence of every channel on its own, h_t = exp(g_t) h_{t-1} + x_t."""

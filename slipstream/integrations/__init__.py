"""Slipstream inside other libraries; importing one of these modules registers it there."""

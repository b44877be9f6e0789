"""How things are computed, one folder per family; slipstream.ops is what users call."""

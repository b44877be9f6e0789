"""The running mean in Triton; launch.py is imported when chosen."""

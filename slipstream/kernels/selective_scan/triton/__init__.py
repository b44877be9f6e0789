"""The selective scan in portable Triton; launch.py is imported when chosen."""

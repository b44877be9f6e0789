"""Selective scan of Mamba: a state of N numbers for every channel, its gates made of the input."""

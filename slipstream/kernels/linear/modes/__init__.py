"""Options of the linear family that only transform inputs and results, one file each."""

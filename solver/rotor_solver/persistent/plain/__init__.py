"""Small tables without compiled kernels: the same numbers by NumPy, a row at a time."""

"""Arrays in, arrays out: the arithmetic of the bit contract in numba and numpy; no I/O, no Ray, no config."""

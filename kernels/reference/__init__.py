"""Plain numpy twins of the kernels: slow, obvious, and equal to them in every bit the contract fixes."""

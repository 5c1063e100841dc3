"""Benches of the kernels: `pytest bench`, on a GPU where there is one and on the CPU else."""

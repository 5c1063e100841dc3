"""Horovod's functions and names."""

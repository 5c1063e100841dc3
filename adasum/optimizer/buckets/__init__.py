"""Buckets of parameters: how they are divided, where gradients lie, and their reductions."""

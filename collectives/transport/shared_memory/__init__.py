"""Symmetric memory: the signal pads and buffers that the ranks of a host share."""

"""Symmetric memory: the signal pads and buffers that a host's ranks share."""

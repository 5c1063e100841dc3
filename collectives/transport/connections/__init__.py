"""Connections to single peers, through shared memory or over TCP."""

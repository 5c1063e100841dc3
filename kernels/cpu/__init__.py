"""The CPU path: C compiled at first use, or torch's functions."""

"""The CPU path: C compiled at installation, or torch's functions."""

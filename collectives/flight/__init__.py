"""The command `python -m collectives.flight`; the code is in `collectives.tools.flight`."""

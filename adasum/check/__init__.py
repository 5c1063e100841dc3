"""`python -m adasum.check`: a report of this machine, and checks of what works on it."""

"""The consistency check: do all ranks make the same call?"""

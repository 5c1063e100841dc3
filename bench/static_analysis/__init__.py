"""Analyse the machine code of each kernel without a GPU.

cases.py lists the launchers' compilations, compiled.py compiles and reads them, sass.py follows
paths through machine code, occupancy.py computes how many programs fit on a multiprocessor, and
table.py and __main__.py write the table.
"""

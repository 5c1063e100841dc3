"""The machine code that the compiler makes of each kernel, read without a GPU.

cases.py says how the launchers compile, compiled.py compiles and reads, sass.py follows the paths
through machine code, occupancy.py says what a multiprocessor holds, table.py and __main__.py write
the table.
"""

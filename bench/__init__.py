"""Benches of the kernels: `pytest bench`, on a GPU where there is one and on the CPU else.

bench_*.py hold the rows and peers*.py their rivals; case.py refuses wrong answers, timing.py and
measure.py time, goals.py judges, report.py and plots.py show. conftest.py has the options.
"""

"""Benches of the kernels: `pytest bench`, on a GPU where there is one and on the CPU else.

bench_*.py hold the rows and peers*.py their rivals; case.py refuses wrong answers, timing.py and
measure.py time, goals.py judges, report.py and plots.py show. conftest.py has the options.

Between ranks: all_reduce.py (and horovod_all_reduce.py), gradients.py, overlap.py; each says how it
is started.
"""

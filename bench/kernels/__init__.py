"""The kernels beside every way in which torch does the same.

bench_*.py hold the rows and peers_*.py the peers. case.py refuses wrong answers, measure.py and
timing.py time, goals.py has the goals, judging.py judges, report.py writes tables and plots,
conftest.py has the options.
host_cost.py measures what calls and plans cost the host, and compares two checkouts.
"""

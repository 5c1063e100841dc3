"""A report to attach to an issue: what is installed, which transports can be used, what works.

    python -m adasum.check                    # the report, then every check, a line each
    python -m adasum.check --no-self-test     # the report alone
    python -m adasum.check adasum "two ranks" # these checks alone

The exit status is 1 where a line says FAILED, else 0.

    report.py       what is installed, and what of it fits
    checks.py       the list of checks, and how one is run and said
    one_gpu.py      those of a GPU: kernels, plans, graphs and streams
    ranks.py        those of several ranks: on the CPU, and over NCCL
    supervisor.py   runs the checks in other processes, and ends what hangs
"""

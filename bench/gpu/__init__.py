"""All that a machine with a GPU is asked, in order of worth, resumable and bounded in time.

    python -m bench.gpu                       # everything, an hour and more
    python -m bench.gpu --minutes 9           # as much as fits; call it again to go on
    python -m bench.gpu --nccl libnccl.so.2.gz    # with an NCCL that takes several ranks on a GPU

It runs from a checkout (PYTHONPATH=.) and needs torch, triton, numpy, pytest, pytest-benchmark and
hypothesis; cupy for NCCL's other half, matplotlib for plots.

    plan.py         the stages, in order of worth
    stages.py       runs them: what is done is skipped, what takes too long is ended
    machine.py      what the machine is and has
    predictions.py  what was predicted, and what measures it
    page.py         the page and tables of a run
    cut_nccl.py     makes a libnccl.so.2 small enough to bring
    sweep.py        compares every kernel with float64; the sanitizers run it
"""

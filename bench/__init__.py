"""Benches: each compares what this library does with its peers in one and the same run.

    kernels/           the kernels beside torch: `make bench`, on a GPU where there is one
    collectives/       all-reduces between ranks beside torch.distributed and Horovod
    gpu/               all of it on a machine with a GPU, in one command: `make gpu`
    static_analysis/   what the compiler makes of each kernel: `make bench-compiled`, no GPU needed
    results/           tables of whole runs

NOTES.md has what was learnt. shapes.py has the parameter shapes of real models, processes.py runs
commands to their end or in turns, tables.py prints.
"""

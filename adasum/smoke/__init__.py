"""The smoke test of a machine with a GPU: kernels, plans, graphs, streams and NCCL, a line each.

    python -m adasum.smoke                    # as `python -m adasum.check` runs it
    python -m adasum.smoke --here adasum      # only these checks, in this process

Kernels are held against their float64 references on fresh random numbers, with outputs of NaN, in
all dtypes, on tensors that begin on a 16-byte boundary and one element off it. The exit status is 1
where a line says FAILED, 2 where torch sees no GPU.

    one_gpu.py      the checks of kernels, plans, graphs and streams
    ranks.py        the ranks that reduce over NCCL
    supervisor.py   runs the checks and prints their lines
"""

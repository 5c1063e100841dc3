"""An emulator of PTX: runs the kernels' compiled code on CPU tensors and checks what it does.

Triton's interpreter runs a kernel's source. This runs what the compiler made of it, and so shows
that the compiled code computes the same, that its accesses are aligned, in bounds and ordered by
barriers and atomics, that programs which wait for each other finish in any order, and how much
memory is moved. It says nothing about time. Launches of several ranks, each on a GPU of its own,
run together: their programs are interleaved at random, and what no release and acquire of the
system's scope orders between them is a race. Ranks of several nodes may run beside each other.

An instruction that is not listed by name, modifiers and type raises NotImplementedError.

    from tests.ptx_emulator.driver import emulated

    with emulated(traffic=True) as emulator:
        kernels.sum_n([a, b])
    print(emulator.launches[0].traffic.load_sectors)
    with emulated() as emulator, emulator.together():
        ...  # a launch for each rank
"""

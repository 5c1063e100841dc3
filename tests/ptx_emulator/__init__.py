"""An emulator of PTX: runs the kernels' compiled code on CPU tensors and checks what it does.

Triton's interpreter runs a kernel's source. This runs what the compiler made of it, and so shows
that the compiled code computes the same, that its accesses are aligned, in bounds and ordered by
barriers and atomics, that programs which wait for each other finish in any order, and how much
memory is moved. It says nothing about time.

An instruction that is not listed by name, modifiers and type raises NotImplementedError.

    from tests.ptx_emulator.driver import emulated

    with emulated(traffic=True) as emulator:
        kernels.sum_n([a, b])
    print(emulator.launches[0].traffic.load_sectors)
"""

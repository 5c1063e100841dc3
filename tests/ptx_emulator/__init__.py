"""The kernels' compiled code (PTX), run and watched on the host: an emulator for tests and counts.

What Triton's interpreter cannot show, since it runs the source: that the compiled code computes the
same, that its accesses are aligned, inside their tensors and ordered by barriers and atomics, that
programs which wait for each other get on in any order, and how much memory it moves. It says
nothing of time.
"""

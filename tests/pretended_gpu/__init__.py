"""A GPU that is pretended, on which the first day on a real one is rehearsed to its last line.

    libcuda.c      what Triton's launcher links: one GPU, memory of the host, launches handed on
    libnccl.c      what cupy's module links: ranks that are threads of a process
    guard.cpp      what torch's CPU build lacks to take tensors of CUDA
    build.py       compiles these three, and gets cupy's wheel
    device.py      the device: its clock, captures and launches
    torch_cuda.py  torch.cuda on it, and the operations on its tensors
    pretend.py     gives a process all of it, and compares each launch with what was asked for
    rehearsal.py   the parts of the day

Real are torch's Python above its C part, its tensors (on `cuda:0`) and dispatcher, Triton with its
compiler and launcher, cupy's wheel, and all of this project. A launch's grid, block, arguments and
attributes are those that reach the driver. What it computes is computed

- by tests/ptx_emulator, from the PTX of the kernel, with the device's allocations as bounds;
- where that takes too long, by kernels/cpu on the same memory: such a launch is counted.
  All of bench's rows and of ranks, and `adasum.check` but for rehearsal.EMULATED, are such.

torch's operations on CUDA tensors run on the CPU. Work is done at once, in the order of the host:
a missing event or synchronization is not seen (tests/fakes is for that). Seconds are the device's
clock's, 10 us for each thing put on a stream, so no figure says how fast anything is.

Never reached without a GPU, and what stays untested by it:

- ProcessGroupNCCL: `init_process_group("nccl")` is gloo's here, so `device_id`, NCCL's own sums
  of torch and its watchdog; collectives/transport/nccl/backend.py, but over tests/fakes;
- Inductor's code for GPUs: peers compiled by torch (bench/kernels/peers_compiled.py) are left out
  as those that fail, and tests/kernels/torch_compile;
- autograd's device threads and DistributedDataParallel on CUDA: tests/processes marked `gpu`;
- memory that is pinned or runs out, the caching allocator, record_stream;
- `chip_of` on other chips, and whatever needs two GPUs; compute-sanitizer.
"""

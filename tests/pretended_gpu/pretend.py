"""Give a process the pretended GPU with all that is around it, and look at what it launches.

environment()   for a process that is to have it: its Python installs it before anything else
install()       for this process, for good
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretended_gpu import build, torch_cuda
from tests.pretended_gpu.device import NODE, Bound, Device
from tests.ptx_emulator import memory

# "counted": kernels/cpu computes what launches would; three sizes for adasum.check.
COUNTED, SIZES = "ADASUM_PRETENDED_COUNTED", "ADASUM_PRETENDED_SIZES"
# Kernels of cooperative launches, and those that begin while the kernel ahead ends.
_COOPERATIVE, _DEPENDENT = {"_one_launch_kernel", *NODE}, "_combine_kernel"


def environment(counted: bool, sizes: tuple[int, int, int] | None = None) -> dict[str, str]:
    """Return the variables of a process that has the GPU."""
    folders = [str(build.HERE / "site"), str(build.ROOT), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), COUNTED: str(int(counted))}
    return found | ({SIZES: ",".join(map(str, sizes))} if sizes else {})


def install(options: Mapping[str, str] = os.environ) -> Device:
    """Give this process the GPU, cupy and NCCL; options: as in `environment`."""
    _install_nccl()
    device = torch_cuda.install()
    device.emulated = options.get(COUNTED, "0") == "0"
    watch(device)
    memory.allocations = lambda: {**device.allocations}
    if SIZES in options:
        from adasum.check import checks

        checks.NUMEL = int(options[SIZES].split(",")[1])
    return device


def _install_nccl() -> None:
    """Let cupy's wheel find the pretended NCCL; let gloo stand for torch's own."""
    ctypes.CDLL(str(build.libnccl()), mode=ctypes.RTLD_GLOBAL)
    if (folder := build.cupy()) is not None:
        sys.path.append(str(folder))
    start = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        start("gloo" if backend == "nccl" else backend, **options)

    total = dist.all_reduce

    def all_reduce(tensor: Tensor, *others: Any, **options: Any) -> Any:
        return total(torch_cuda.host(tensor), *others, **options)

    dist.init_process_group, dist.all_reduce = init_process_group, all_reduce


def watch(device: Device) -> None:
    """Compare each launch with what `Kernel.bind` was asked for; where counted, compute it."""
    from kernels import binding
    from kernels.cpu import dispatch
    from kernels.gpu import launcher

    bind, bound = launcher.Kernel.bind, binding._bound

    def told(self: Any, programs: int, leading: Any, *arguments: Any, **constants: Any) -> Any:
        launch = bind(self, programs, leading, *arguments, **constants)
        given = [one.dtype for one in arguments if isinstance(one, Tensor)]
        given += [one for one in constants.values() if isinstance(one, torch.dtype)]
        device.dtypes.update(str(dtype).removeprefix("torch.") for dtype in given)
        name, threads = self.function.__name__, 32 * constants["num_warps"]
        names = {"cooperative"} if name in _COOPERATIVE else set()
        if name == _DEPENDENT and constants["DEPENDENT"]:
            names.add("dependent")

        run, count = launch.run, len(leading) + len(arguments)

        def compared(*given: Tensor | int, stream: int) -> None:
            passed = tuple(_numbers(given[:count]))
            device.expected.bound = Bound(name, programs, threads, frozenset(names), passed)
            try:
                run(*given, stream=stream)
            finally:
                device.expected.bound = None

        launch.run = compared
        return launch

    def computed(call: Any) -> Any:
        launch = bound(call)
        if device.emulated or not call.out.is_cuda:
            return launch
        on_host = dispatch.bind(call)

        def run(*scalars: float) -> None:
            launch(*scalars)
            device.put(lambda: on_host(*scalars), 0.0)

        return run

    launcher.Kernel.bind = told
    binding._bound = computed


def _numbers(values: tuple[Any, ...]) -> Iterator[int]:
    """Yield what reaches a kernel, addresses and integers; None is a constant."""
    for value in values:
        if value is not None:
            yield value.data_ptr() if isinstance(value, torch.Tensor) else int(value)

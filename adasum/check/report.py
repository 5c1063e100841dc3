"""The report: installed packages, whether they fit this torch, and usable transports."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import operator
import os
import platform
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import kernels
from collectives.bootstrap.launchers import LAUNCHERS_VARIABLES
from collectives.transport import load_nccl
from kernels import __version__ as adasum_version
from kernels.validation import did_you_mean

# Packages for each CUDA version: the extra's cupy, and the NCCL that torch's wheel brings.
_CUDA = {f"cuda{n}": (f"cupy-cuda{n}x", f"nvidia-nccl-cu{n}") for n in (12, 13)}
_PACKAGES = ("triton", "numpy", *itertools.chain(*_CUDA.values()))
# Private names of torch that a new version may change silently, "module:attribute". A test in
# tests/architecture compares this list and gives reasons. Names of torch.distributed are called
# at every init, which then fails with the name.
_FUNCTION_MODES = ("_get_current_function_mode_stack", "_pop_mode_temporarily")
PRIVATE_NAMES = (
    *(f"torch:_foreach_{each}_" for each in ("add", "copy", "sub", "zero")),
    "torch:_foreach_norm",
    "torch:_C._current_graph_task_id",
    "torch._dynamo",
    "torch:_C._functorch",
    *(f"torch:_C._len_torch_{each}_stack" for each in ("dispatch", "function")),
    "torch:autograd.Variable._execution_engine",
    "torch.autograd.forward_ad:_current_level",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
    *(f"torch.overrides:{each}" for each in _FUNCTION_MODES),
    "torch.utils:_device",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.distributed._symmetric_memory:_SymmetricMemory",
    *(
        f"torch.distributed.distributed_c10d:{each}"
        for each in ("_world.pg_map", "_world.pg_group_ranks", "_new_process_group_helper")
    ),
)
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("ADASUM_TRANSPORT", "ADASUM_BACKEND_ORDER", "ADASUM_CPU_KERNELS", "CC", "GLOO_SOCKET_IFNAME"),
    *("ADASUM_LOG", "ADASUM_STALL_WARNING_SECONDS", "ADASUM_CHECK_PARAMETERS"),
    *("ADASUM_FLIGHT_FOLDER", "ADASUM_CUDA_GRAPHS", "ADASUM_NODE_MEMORY"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *LAUNCHERS_VARIABLES,
)


def report() -> list[str]:
    """Return the report's lines, in sections: versions, devices, transports, environment."""
    lines = []
    for section in (_versions, _devices, _transports, _environment):
        lines.append(f"{section.__name__[1:]}:")
        lines += [f"  {name:24} {value}" for name, value in section().items()]
    return lines


def _versions() -> dict[str, str]:
    return {
        "adasum": adasum_version,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {platform.machine()}",
        # torch.__version__, because a wheel's metadata may leave out the CUDA version.
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "extra for this torch": _extra(),
        "private names of torch": _private_names(),
        "kernels imported from": os.path.dirname(kernels.__file__ or "?"),
    }


def _extra() -> str:
    """Return advice on the packages for this torch's CUDA: which to install or uninstall."""
    major = (torch.version.cuda or "").partition(".")[0]
    if f"cuda{major}" not in _CUDA:
        return "none: a CPU build" if not major else f"none: torch is for CUDA {major}"
    others = [name for extra, names in _CUDA.items() if extra != f"cuda{major}" for name in names]
    wrong = " ".join(name for name in others if _version(name) != "not installed")
    text = f'pip install "cupy-cuda{major}x>=14.2"'
    if "nccl" in wrong:
        # Two wheels own one file: uninstalling one removes it for the other, too.
        wrong += f" and pip install --force-reinstall --no-deps nvidia-nccl-cu{major}"
    return text + (f", but first pip uninstall {wrong}: torch is for CUDA {major}" if wrong else "")


def _private_names() -> str:
    """Return text that says whether torch has the private names that this library uses."""
    missing = []
    for name in PRIVATE_NAMES:
        module, _, attributes = name.partition(":")
        try:
            found = importlib.import_module(module)
            if attributes:
                operator.attrgetter(attributes)(found)
        except (ImportError, AttributeError):
            missing.append(name)
    if not missing:
        return f"all {len(PRIVATE_NAMES)} there"
    return f"MISSING, so this torch is not supported yet: {', '.join(missing)}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = [
        f"{each.name}, {each.total_memory >> 30} GiB, sm_{each.major}{each.minor}" for each in gpus
    ]
    return {
        "processors": f"{usable} usable of {os.cpu_count()}, torch uses {torch.get_num_threads()}",
        "CPU tensors by": _or_why_not(lambda: kernels.backend_info().cpu_path),
        "CUDA of torch": torch.version.cuda or "none: a CPU build",
        "GPUs": "; ".join(found) or "none that torch sees: kernels run on the CPU",
    }


def _transports() -> dict[str, str]:
    missing = "not in this build of torch"
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "shared memory": _or_why_not(_shared_memory),
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else missing,
        "NCCL through cupy": _or_why_not(
            lambda: f"yes, {load_nccl().get_version()}, on request: init(transport='nccl')"
        ),
        "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version())) if nccl else missing,
    }


def _or_why_not(find: Callable[[], str]) -> str:
    try:
        return find()
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return f"no: {error}"


def _shared_memory() -> str:
    os.close(os.memfd_create("adasum-check"))
    return "yes"


def _environment() -> dict[str, str]:
    names = [*_VARIABLES, *sorted(name for name in os.environ if name.startswith("NCCL_"))]
    found = {name: os.environ[name] for name in names if name in os.environ}
    for name in sorted(os.environ):
        if name.startswith("ADASUM_") and name not in _VARIABLES:
            hint = did_you_mean(name, _VARIABLES)
            found[name] = f"{os.environ[name]}: not a variable of adasum" + (hint and f": {hint}")
    return found or {"": "nothing set that matters here"}

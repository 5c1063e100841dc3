"""What the library can use on this machine; Horovod's questions, answered for this library."""

from __future__ import annotations

import torch
import torch.distributed as dist

from collectives import default_group, is_initialized

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """False: MPI is not used."""
    return False


def gloo_built() -> bool:
    """Whether torch.distributed, and so this library, has gloo."""
    return bool(dist.is_available() and dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Whether the ranks have met over gloo: not before init, alone, or as threads."""
    if not is_initialized():
        return False
    return default_group().transport.process_group is not None


def nccl_built() -> int:
    """The version of torch's NCCL as NCCL codes it (22703 for 2.27.3), 0 where it has none.

    Horovod's scripts multiply Adasum's learning rate by local_size() where this is true, because
    Horovod then averages inside a host. Here Adasum is over all ranks unless asked otherwise, so
    that the factor has no place (it has with algorithm="collective/vhdd" and others of two levels).
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """Whether torch, and so this library, can use CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built for ROCm; this library is not tested on it."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False

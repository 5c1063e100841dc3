"""What this library can use on this machine, as answers to Horovod's questions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from collectives import default_group, is_initialized


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_built() -> bool:
    """Return whether torch.distributed has gloo."""
    return bool(dist.is_available() and dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Return whether gloo connects the ranks: not before init, for one rank, or for threads."""
    return is_initialized() and default_group().transport.process_group is not None


def nccl_built() -> int:
    """Return the version of torch's NCCL in NCCL's coding (22703 for 2.27.3), 0 without NCCL.

    Horovod's scripts multiply Adasum's learning rate by local_size() where this is true, because
    Horovod averages within a host. Here Adasum runs over all ranks, so the factor is wrong, except
    with a two-level algorithm such as algorithm="collective/vhdd".
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm, on which this library is not tested."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False

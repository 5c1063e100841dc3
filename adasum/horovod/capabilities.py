"""Horovod's functions that ask for capabilities, answered for this library and machine."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from collectives import default_group, is_initialized

# Whether nccl_built() has answered yes: Horovod's scripts then scale Adasum's learning rate.
_answered_nccl = False


def warn_of_scaled_rate(algorithm: str | None) -> None:
    """Warn on rank 0 if Adasum's learning rate may be `local_size()` times too high.

    A rate does not show how it was computed, but we know that the script has called `nccl_built`,
    as Horovod's scripts do before they multiply, and that the factor is not 1. With an algorithm of
    two levels, which averages within a host as Horovod does, the factor is right. One warning per
    call of `nccl_built`.
    """
    global _answered_nccl
    group = default_group()
    two_levels = algorithm is not None and "/" in algorithm
    if not _answered_nccl or two_levels or group.local_size == 1 or group.rank != 0:
        return
    _answered_nccl = False
    warnings.warn(
        f"op=Adasum after nccl_built() with {group.local_size} ranks on this host: Horovod's "
        "scripts multiply the learning rate by local_size() then, because Horovod averages within "
        "a host. Here Adasum runs over all ranks, and such a rate is too high. Check it: either do "
        'not multiply it, or keep the factor and pass algorithm="rechd/vhdd", which averages '
        "within a host",
        stacklevel=3,
    )


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
    """Return whether torch.distributed has gloo.

    Examples:
        >>> hvd.gloo_built()
        True
    """
    return bool(dist.is_available() and dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Return whether gloo connects the ranks; False before init, with one rank, or for threads.

    Examples:
        >>> hvd.gloo_enabled()
        False
    """
    return is_initialized() and default_group().transport.process_group is not None


def nccl_built() -> int:
    """Return the version of torch's NCCL in NCCL's coding (22703 for 2.27.3), 0 without NCCL.

    Horovod's scripts multiply Adasum's learning rate by local_size() if this is true. With this
    library that is wrong unless the algorithm has two levels, so `DistributedOptimizer` warns.
    """
    global _answered_nccl
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    _answered_nccl = True
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm; this library is not tested there."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False

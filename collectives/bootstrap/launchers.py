"""What torchrun says in environment variables; other launchers set other ones."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

# By the variable that holds the number of processes.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def world_size() -> int:
    """Return how many ranks torchrun started; 1 without it.

    Raises:
        ValueError: Variables are wrong or missing, or another launcher's.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 2:
        _refuse_to_stand_alone()
        return 1
    if missing:
        raise ValueError(
            f"environment variable {missing[0]} is not set, the other of RANK and WORLD_SIZE is: "
            "start with torchrun, or set both"
        )
    _, size = _rank_of("RANK", "WORLD_SIZE")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(f"environment variable {name} is not set: start with torchrun")
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"MASTER_PORT must be a port from 1 to 65535, got {port!r}")
        local_ranks()
    return size


def local_ranks() -> tuple[int, int] | tuple[None, None]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE if both are set."""
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return _rank_of("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return None, None


def can_use_nccl(size: int) -> bool:
    """Return whether every rank of this host, of `size` in all, can have its own GPU for NCCL."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return dist.is_nccl_available() and gpus >= (local_ranks()[1] or size)


def _rank_of(rank_name: str, size_name: str) -> tuple[int, int]:
    """Return a rank's number and how many there are, by the variables of these names."""
    said = os.environ[rank_name], os.environ[size_name]
    try:
        rank, size = map(int, said)
    except ValueError:
        rank, size = 0, 0
    if not 0 <= rank < size:
        raise ValueError(
            f"{rank_name} must be an integer from 0 to {size_name} - 1, got {said[0]!r} of "
            f"{said[1]!r}"
        )
    return rank, size


def _refuse_to_stand_alone() -> None:
    """Raise ValueError in one of several processes of such a launcher.

    Each would take itself for the only rank: all would train alone, on the same data, and write the
    same checkpoints, without an error.
    """
    for variable, launcher in _LAUNCHERS.items():
        size = os.environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            raise ValueError(
                f"{launcher} started {size} processes (environment variable {variable}), and none "
                "of them would know of the others: start them with torchrun, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each (RANK=0 and WORLD_SIZE=1 where "
                "each is meant to be alone)"
            )

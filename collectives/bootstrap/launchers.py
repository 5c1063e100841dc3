"""Read the ranks from the environment variables of torchrun, or of another launcher."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from collectives.bootstrap import slurm


class _Launcher(NamedTuple):
    """A launcher, and its names for RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""


_MPIEXEC = _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# The first one found counts, and the one that the user called is to count: mpirun may start its
# ranks through srun, and horovodrun through either.
_LAUNCHERS = (
    _Launcher(
        "horovodrun", *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    ),
    _Launcher(
        "mpirun",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _MPIEXEC,
    _SRUN,
)
LAUNCHERS_VARIABLES = tuple(variable for each in _LAUNCHERS for variable in each[1:] if variable)
# Ports from 10,000 to 28,978: below torchrun's 29,400, and below 32,768, where Linux begins to give
# ports to clients. A prime number of them, so that multiples of _STEPS_APART do not repeat early.
_FIRST_PORT, _PORTS = 10_000, 18_979
# How far apart the ports of consecutive jobs are: _PORTS over the golden ratio, which spreads jobs
# evenly. Two steps never get the same port if their jobs' numbers differ by less than 100 and their
# own by less than 90.
_STEPS_APART = 11_730
_LOOPBACK = "127.0.0.1"
_logger = logging.getLogger(__name__)
# For each address of a store: a text that is different for another job with the same address.
_jobs: dict[str, str] = {}


def world_size() -> int:
    """Return how many ranks a launcher started; 1 without one.

    RANK and WORLD_SIZE are used if they are set; otherwise another launcher's variables are, and
    torchrun's six variables are set from them. ValueError where variables are wrong or missing.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 2:
        launcher = _launcher()
        if launcher is None or os.environ[launcher.size] == "1":
            return 1
        _translate(launcher)
    elif missing:
        raise ValueError(
            f"environment variable {missing[0]} is not set, the other of RANK and WORLD_SIZE is: "
            "start with torchrun, or set both, or, under another launcher, neither"
        )
    _, size = _rank_of("RANK", "WORLD_SIZE")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(
                    f"environment variable {name} is not set: start with torchrun, or set "
                    "MASTER_ADDR and MASTER_PORT on all ranks to the address of rank 0's host and "
                    "a free port there"
                )
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"MASTER_PORT must be a port from 1 to 65535, got {port!r}")
        local_ranks()
    return size


def job() -> str:
    """Return a text that no other job at this address has; "" if the user gave the address."""
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return _jobs.get(f"{host}:{port}", "")


def local_ranks() -> tuple[int, int] | tuple[None, None]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE if both are set."""
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return _rank_of("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return None, None


def gpus_for_nccl(size: int) -> list[str] | None:
    """Return the identities of this rank's GPUs, of which NCCL needs one for each rank.

    Empty where this host has enough for all its ranks, or NCCL lets them share one. None without
    NCCL or a GPU. Without LOCAL_WORLD_SIZE all `size` ranks may be on this host.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0 or not dist.is_nccl_available():
        return None
    if gpus >= (local_ranks()[1] or size) or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(gpus)]


def _rank_of(rank_name: str, size_name: str) -> tuple[int, int]:
    """Read a rank and the number of ranks from these two environment variables."""
    said = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
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


def _launcher() -> _Launcher | None:
    """Return the launcher that started this process; None if none did."""
    found = next((each for each in _LAUNCHERS if os.environ.get(each.size)), None)
    # `srun --mpi=pmi2` sets mpiexec's variables, too, but not those of the local ranks.
    if found is _MPIEXEC and _MPIEXEC.local_rank not in os.environ:
        said = [[os.environ.get(name) for name in (by.rank, by.size)] for by in (_MPIEXEC, _SRUN)]
        return _SRUN if said[0] == said[1] else found
    return found


def _translate(launcher: _Launcher) -> None:
    """Set torchrun's environment variables from another launcher's.

    torch's "env://", frameworks that use it, and scripts that read LOCAL_RANK then find them.
    Variables that are set already are not changed.
    """
    rank, size = _rank_of(launcher.rank, launcher.size)
    local_rank, local_size = _local_ranks(launcher)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # All ranks must derive the same port: from the job and step under srun, else from the process
    # that started the ranks, which they have in common only if all are on this host.
    own_port = not port and (launcher is _SRUN or local_size == size)
    if own_port:
        number = slurm.step_number(_STEPS_APART) if launcher is _SRUN else _started_by(launcher)
        port = str(_FIRST_PORT + number % _PORTS)
    if not host and local_size == size:
        host = _LOOPBACK
    elif not host and launcher is _SRUN:
        host = slurm.first_host()
    if not (host and port):
        raise ValueError(
            f"environment variable {'MASTER_PORT' if host else 'MASTER_ADDR'} is not set, and "
            f"{launcher.name}, which started {size} ranks, does not say that all are on one host: "
            "set MASTER_ADDR and MASTER_PORT on all ranks to the address of rank 0's host and a "
            "free port there (mpirun -x, mpiexec -genv)"
        )
    if own_port:
        _jobs[f"{host}:{port}"] = f" of {launcher.name} {number}"
    if local_size is not None and local_ranks() == (None, None):
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=port)
    _logger.info(
        "rank %d of %d, by %s's variables, at %s:%s", rank, size, launcher.name, host, port
    )


def _local_ranks(launcher: _Launcher) -> tuple[int, int] | tuple[None, None]:
    """Return the local rank and the number of this host's ranks, if the launcher gives both."""
    if launcher is _SRUN:
        said, local_size = os.environ.get(launcher.local_rank, ""), slurm.local_size()
        if local_size is None or not said.isdecimal() or int(said) >= local_size:
            return None, None
        return int(said), local_size
    if not {launcher.local_rank, launcher.local_size} <= {*os.environ}:
        return None, None
    return _rank_of(launcher.local_rank, launcher.local_size)


def _started_by(launcher: _Launcher) -> int:
    """Return a number that identifies the process that started this host's ranks.

    It is the nearest ancestor without the launcher's variables. Nearer ones, such as a shell that
    starts a rank, have the variables, and each rank has its own. Its start time (clock ticks since
    boot) is in the high bits and its process id in the low 22 bits. The id alone is not enough:
    containers that share a network each have a process 1.
    """
    process, started = os.getppid(), 0
    # OSError where there is no /proc, or a process is another user's, which hides its environment:
    # such a process is not a rank, so the search ends there.
    with suppress(OSError):
        while True:
            place = Path(f"/proc/{process}")
            # From the third field on, behind the last ")": the second one, the name, may hold any
            # characters.
            fields = place.joinpath("stat").read_bytes().rpartition(b")")[2].split()
            started = int(fields[19])
            said = place.joinpath("environ").read_bytes().split(b"\0")
            if not any(each.startswith(f"{launcher.rank}=".encode()) for each in said):
                break
            process, started = int(fields[1]), 0
    return started << 22 | process

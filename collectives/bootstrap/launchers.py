"""Read the ranks from the environment variables of torchrun or another launcher."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class _Launcher(NamedTuple):
    """A launcher, and its names for RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""


_OMPI = "OMPI_COMM_WORLD_"
_MPIEXEC = _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# The first one found counts; it must be the one that the user called: mpirun may start its ranks
# through srun, and horovodrun through either.
_LAUNCHERS = (
    _Launcher(
        "horovodrun", *(f"HOROVOD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    _Launcher("mpirun", *(_OMPI + n for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _MPIEXEC,
    _SRUN,
)
LAUNCHERS_VARIABLES = tuple(variable for each in _LAUNCHERS for variable in each[1:] if variable)
# Ports from 10,000 to 28,978: below torchrun's 29,400 and Linux's ports for clients, from 32,768
# on. The ports of consecutive Slurm jobs are _PORTS over the golden ratio apart, so that the steps
# of nearby jobs never get the same port.
_FIRST_PORT, _PORTS, _STEPS_APART = 10_000, 18_979, 11_730
_SET = (
    "set MASTER_ADDR and MASTER_PORT on all ranks to the address of rank 0's host and a free port "
    "there"
)
_logger = logging.getLogger(__name__)


def world_size() -> int:
    """Return the number of ranks that a launcher started; 1 without a launcher.

    RANK and WORLD_SIZE are used if they are set; otherwise torchrun's six variables are set from
    another launcher's. Raises ValueError if variables are wrong or missing.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 2:
        launcher = _launcher()
        if launcher is None or os.environ[launcher.size] == "1":
            return 1
        _translate(launcher)
    elif missing:
        raise ValueError(
            f"environment variable {missing[0]} is not set, but RANK and WORLD_SIZE go together: "
            "start with torchrun, or set both; under another launcher set neither"
        )
    _, size = _rank_of("RANK", "WORLD_SIZE")
    if size == 1:
        return 1
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(
                f"environment variable {name} is not set: start with torchrun, or {_SET}"
            )
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


def gpu_for_nccl(rank: int, size: int) -> str | None:
    """Return the identity of this rank's GPU, since NCCL's ranks need different ones.

    "" if this host has enough GPUs for its ranks, or NCCL lets ranks share one; None if there is no
    GPU or no NCCL. Without LOCAL_WORLD_SIZE all `size` ranks may be on this host.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0 or not dist.is_nccl_available():
        return None
    local_rank, local_size = local_ranks()
    if gpus >= (local_size or size) or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    # There may be one visible GPU per rank, if the launcher assigns them.
    number = (rank if local_rank is None else local_rank) % gpus
    return str(torch.cuda.get_device_properties(number).uuid)


def _rank_of(rank_name: str, size_name: str) -> tuple[int, int]:
    """Return the rank and the number of ranks from these two environment variables."""
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
    """Return the launcher that started this process, or None."""
    found = next((each for each in _LAUNCHERS if os.environ.get(each.size)), None)
    # `srun --mpi=pmi2` sets mpiexec's variables too, except the ones for local ranks.
    if found is _MPIEXEC and _MPIEXEC.local_rank not in os.environ:
        said = [[os.environ.get(name) for name in (by.rank, by.size)] for by in (_MPIEXEC, _SRUN)]
        return _SRUN if said[0] == said[1] else found
    return found


def _translate(launcher: _Launcher) -> None:
    """Set torchrun's environment variables from another launcher's.

    torch's "env://", frameworks that use it, and scripts that read LOCAL_RANK need them. If set
    already, the address, port and local ranks are kept.
    """
    rank, size = _rank_of(launcher.rank, launcher.size)
    local_rank, local_size = _local_ranks(launcher)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # All ranks must derive the same port: from the job and step under srun, otherwise from the
    # process that started the ranks, which is the same only if all are on this host.
    if not port and (launcher is _SRUN or local_size == size):
        number = _step_number() if launcher is _SRUN else _started_by(launcher)
        port = str(_FIRST_PORT + number % _PORTS)
    if not host and local_size == size:
        host = "127.0.0.1"
    elif not host and launcher is _SRUN:
        host = _first_host()
    if not (host and port):
        raise ValueError(
            f"environment variable {'MASTER_PORT' if host else 'MASTER_ADDR'} is not set, and "
            f"{launcher.name}, which started {size} ranks, does not say that all are on one host: "
            f"{_SET} (mpirun -x, mpiexec -genv)"
        )
    if local_size is not None and local_ranks() == (None, None):
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=port)
    _logger.info("rank %d of %d, by %s, at %s:%s", rank, size, launcher.name, host, port)


def _local_ranks(launcher: _Launcher) -> tuple[int, int] | tuple[None, None]:
    """Return the local rank and the number of this host's ranks, if the launcher sets both."""
    if launcher is not _SRUN:
        both = {launcher.local_rank, launcher.local_size} <= {*os.environ}
        return _rank_of(launcher.local_rank, launcher.local_size) if both else (None, None)
    said, tasks = (os.environ.get(n, "") for n in ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"))
    # "2(x3),1" means three hosts with two tasks each, and one host with one task.
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in found for _ in range(int(times or 1))]
    node = os.environ.get("SLURM_NODEID", "0" if len(counts) == 1 else "")
    if not (said.isdecimal() and node.isdecimal() and int(node) < len(counts)):
        return None, None
    return (int(said), counts[int(node)]) if int(said) < counts[int(node)] else (None, None)


def _first_host() -> str:
    """Return the first host of the Slurm step, which runs its first task."""
    hosts = os.environ.get("SLURM_STEP_NODELIST", "")
    # The first of "a[08-10,12]x,b" is a08x.
    first = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", hosts).split(",")[0]
    if not first or "[" in first or "]" in first:
        raise ValueError(
            f"SLURM_STEP_NODELIST must name the step's hosts, got {hosts!r}: set MASTER_ADDR to "
            "rank 0's"
        )
    return first


def _step_number() -> int:
    """Return a number for this Slurm step, from the ids of the job and the step."""
    ids = {name: os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    for name, each in ids.items():
        if not each.isdecimal():
            raise ValueError(f"{name} must be a number, got {each!r}: set MASTER_PORT on all ranks")
    return int(ids["SLURM_JOB_ID"]) * _STEPS_APART + int(ids["SLURM_STEP_ID"])


def _started_by(launcher: _Launcher) -> int:
    """Return the process that started this host's ranks: the first ancestor without variables.

    Nearer ancestors, such as shells that start single ranks, have the launcher's variables, and
    differ between ranks.
    """
    process = os.getppid()
    # OSError: there is no /proc, or the process is another user's, and so none of the ranks.
    with suppress(OSError):
        while (
            f"\0{launcher.rank}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
        ):
            # The fourth field; the second one, the name in parentheses, may hold any characters.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process

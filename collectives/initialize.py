"""Starting and shutting down, and the default group."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

import kernels
from collectives import validation
from collectives.bootstrap.calibration import calibrate as measure_link_rates
from collectives.bootstrap.launchers import refuse_to_stand_alone
from collectives.bootstrap.rendezvous import bounded, open_store, wait_for_ranks
from collectives.bootstrap.transport_selection import connect, transport_choice
from collectives.consistency.description import Description
from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.group import Group
from collectives.schedules.topology import Topology
from collectives.transport import GlooTransport, ThreadWorld, subgroup
from collectives.transport.process_groups import first_line

T = TypeVar("T")

_NO_PROCESS_GROUP = (
    "process_group must be a torch.distributed.ProcessGroup that this rank is in, got {}"
)

_group: Group | None = None
_store: tuple[str, dist.Store] | None = None
_thread = threading.local()
_adopted: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def init(
    *,
    timeout: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
    transport: str | None = None,
    calibrate: bool = True,
) -> Group:
    """Join the ranks that torchrun started and return their group; without torchrun, one rank.

    It reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if set, LOCAL_RANK and
    LOCAL_WORLD_SIZE. If torch.distributed is initialised already, or with `process_group`, it uses
    those ranks. A second call returns the first one's group unless that was closed.

    Args:
        timeout: Seconds that any step of a collective may wait for a peer.
        process_group: The torch.distributed process group whose ranks to use.
        transport: How CPU tensors travel. None reads the environment variable ADASUM_TRANSPORT,
            else "auto". It must be the same on all ranks.

            - "auto": shared memory between ranks of one host, TCP between hosts, gloo where neither
              works.
            - "gloo": gloo only.
            - "tcp": TCP only; an error if a rank can reach another by gloo only.
            - "shm": shared memory only; an error if any two ranks share none.
            - "nccl": CUDA tensors travel through cupy's NCCL on each rank's current device, CPU
              tensors as with "auto". Otherwise CUDA tensors travel over torch.distributed.
        calibrate: Whether to measure link rates, for a fraction of a second, by which "auto"
            chooses the algorithm of Sum and Average. False chooses by size alone, the same in every
            run. It must be the same on all ranks.

    Returns:
        The default group.

    Raises:
        ValueError: The environment variables are incomplete or wrong, or only mpirun's, srun's or
            horovodrun's; or `transport` is unknown.
        RuntimeError: There is more than one rank but torch is built without torch.distributed, or
            ADASUM_CPU_KERNELS demands compiled kernels that are not available.
        CollectiveTimeoutError: Ranks did not arrive; the text names them.
        CollectiveMismatchError: Ranks differ in `transport` or `calibrate`. Raised on all ranks.
        TransportError: `transport` is not available. Raised on all ranks.
    """
    global _group
    if (known := _open_group()) is not None:
        return known
    validation.timeout(timeout)
    choice = transport_choice(transport)
    # What it raises, and the second it may take, come before anybody waits.
    kernels.backend_info()
    if not isinstance(calibrate, bool):
        raise TypeError(f"calibrate must be a bool, got {type(calibrate).__name__}")
    if process_group is not None and not (
        dist.is_available() and isinstance(process_group, dist.ProcessGroup)
    ):
        raise TypeError(_NO_PROCESS_GROUP.format(type(process_group).__name__))
    owned = process_group is None
    if process_group is None and not _distributed():
        if _world_size() == 1:
            _group = Group(ThreadWorld(1).transport(0), timeout=timeout, local_rank=0, local_size=1)
            return _group
        _require_distributed()
        # Enough for torch to give up by itself, and to say more about it.
        bounded(lambda: _start_torch_distributed(timeout), int(os.environ["RANK"]), timeout + 3.0)
        process_group = dist.group.WORLD
    elif process_group is None:
        process_group = dist.new_group(timeout=timedelta(seconds=timeout), backend=_backend())
    assert process_group is not None
    gloo = GlooTransport(process_group, owned=owned)
    group: Group | None = None
    try:
        options = {"transport": choice, "calibrate": calibrate}
        group = _over_gloo(gloo, timeout, Description("init", options=options))
        if calibrate and group.size > 1:
            group.set_link_rates(measure_link_rates(group))
    except BaseException:
        (group or gloo).close()
        raise
    _group = group
    atexit.register(shutdown)
    return group


def _start_torch_distributed(timeout: float) -> None:
    """Start torch.distributed from the environment, any number of times in one process.

    The store outlives a shutdown: on a new store at the old port, a quick rank could find the old
    one. Each start has its own part of the store. Another address or port opens another store.
    """
    global _store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + timeout
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if _store is None or _store[0] != address:
        _store = address, open_store(rank, timeout)
    try:
        store = wait_for_ranks(_store[1], rank, size, deadline - time.monotonic())
        dist.init_process_group(
            _backend(),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        # Rank 0 lets go of the port, too.
        _store = None
        if isinstance(error, CollectiveError):
            raise
        others = ", ".join(f"rank {peer}" for peer in range(size) if peer != rank)
        raise CollectiveTimeoutError(
            f"rank {rank} could not connect to all of {others}: {first_line(error)}"
        ) from error


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _require_distributed() -> None:
    if not dist.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} is built without torch.distributed, which ranks in "
            "processes of their own need: pip install a torch that has it, as PyPI's for Linux do, "
            "or use ranks that are threads (run_threads)"
        )


def _world_size() -> int:
    names = ("RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == 2:
        refuse_to_stand_alone()
        return 1
    if missing:
        raise ValueError(
            f"environment variable {missing[0]} is not set, the other of RANK and WORLD_SIZE is: "
            "start with torchrun, or set both"
        )
    try:
        rank, size = (int(os.environ[name]) for name in names)
    except ValueError:
        raise ValueError(
            f"RANK and WORLD_SIZE must be integers, got {os.environ['RANK']!r} and "
            f"{os.environ['WORLD_SIZE']!r}"
        ) from None
    if not 0 <= rank < size:
        raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, got {rank} of {size}")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(f"environment variable {name} is not set: start with torchrun")
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"MASTER_PORT must be a port from 1 to 65535, got {port!r}")
        _local()
    return size


def _local() -> tuple[int | None, int | None]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE if both are set."""
    said = [os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if None in said:
        return None, None
    try:
        rank, size = (int(text or "") for text in said)
    except ValueError:
        rank, size = 0, 0
    if not 0 <= rank < size:
        raise ValueError(
            "LOCAL_RANK must be an integer from 0 to LOCAL_WORLD_SIZE - 1, got "
            f"{said[0]!r} of {said[1]!r}"
        )
    return rank, size


def _backend() -> str:
    """Name gloo, and NCCL if every rank of the host can have a GPU of its own."""
    local_size = _local()[1] or (
        dist.get_world_size() if _distributed() else int(os.environ["WORLD_SIZE"])
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and gpus >= local_size else "gloo"


def new_group(ranks: Sequence[int]) -> Group | None:
    """Return a group of some of the default group's ranks, None on the others: `Group.split`."""
    return default_group().split(ranks)


def from_process_group(process_group: dist.ProcessGroup, *, timeout: float = 300.0) -> Group:
    """Return a group of the ranks of a torch.distributed process group, in its order.

    `init` is not needed. Exactly these ranks must call it. Messages travel over a process group of
    their own, apart from torch's, and through shared memory inside a host. A second call for the
    same process group returns the same Group unless that was closed.

    Args:
        process_group: The process group.
        timeout: Seconds that any step of a collective may wait for a peer.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: `process_group` is not a process group that this rank is in.
        ValueError: `timeout` is not a positive number of seconds.
    """
    _require_distributed()
    if not _distributed():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(_NO_PROCESS_GROUP.format(type(process_group).__name__))
    validation.timeout(timeout)
    known = _adopted.get(process_group)
    if known is None or known.closed:
        # What these raise comes before anybody waits.
        choice = transport_choice(None)
        kernels.backend_info()
        ranks = range(dist.get_world_size(process_group))
        own = GlooTransport(subgroup(process_group, ranks, _backend(), timeout), owned=True)
        start = Description("from_process_group", options={"transport": choice})
        known = _over_gloo(own, timeout, start)
        if not _adopted:
            atexit.register(_close_adopted)
        _adopted[process_group] = known
    return known


def _close_adopted() -> None:
    for group in list(_adopted.values()):
        group.close()


def _over_gloo(gloo: GlooTransport, timeout: float, start: Description) -> Group:
    whole = gloo.size == dist.get_world_size()
    local_rank, local_size = _local() if whole else (None, None)
    return Group(
        connect(gloo, timeout, start),
        timeout=timeout,
        local_rank=local_rank,
        local_size=local_size,
    )


def shutdown() -> None:
    """Close the group that `init` made, if any; `init` may be called again."""
    global _group
    if _group is None:
        return
    group, _group = _group, None
    group.close()
    atexit.unregister(shutdown)


def _open_group() -> Group | None:
    """Return this thread's group under `run_threads`, else that of `init` unless it was closed."""
    own: Group | None = getattr(_thread, "group", None)
    if own is not None or _group is None or _group.closed:
        return own
    return _group


def is_initialized() -> bool:
    """Return whether this thread has a default group that was not closed."""
    return _open_group() is not None


def default_group() -> Group:
    """Return the group of `init`, or of this thread under `run_threads`.

    Raises:
        RuntimeError: There is none, or it was closed.
    """
    group = _open_group()
    if group is None:
        raise RuntimeError("no open group: call init() first")
    return group


def run_threads(
    size: int,
    fn: Callable[[Group], T],
    *,
    timeout: float = 60.0,
    local_size: int | None = None,
) -> list[T]:
    """Run `fn(group)` on ranks that are threads of this process; return the results by rank.

    In each thread the default group is that thread's. The ranks share torch's number of threads,
    and draw from torch's one global random generator in no fixed order: for the same numbers each
    time, use a torch.Generator per rank.

    Args:
        size: Number of ranks.
        fn: Called once per rank.
        timeout: Seconds that any step of a collective may wait for a peer.
        local_size: Ranks per simulated node; None for all on one node.

    Raises:
        ValueError: `local_size` does not divide `size`.
        BaseException: The first rank's error, after all threads have ended. The other ranks'
            collectives fail once they need a rank that has ended.
    """
    validation.integer("size", size)
    validation.timeout(timeout)
    world = ThreadWorld(size)
    topology = Topology(size, size if local_size is None else local_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    groups = [
        Group(
            world.transport(rank),
            timeout=timeout,
            local_rank=topology.local_rank_of(rank),
            local_size=topology.local_size,
            topology=topology,
        )
        for rank in range(size)
    ]

    cores = torch.get_num_threads()

    def main(group: Group) -> None:
        _thread.group = group
        # A new thread's BLAS would start as many threads as there are processors, in every rank.
        torch.set_num_threads(max(1, cores // size))
        try:
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001 - raised below, for all threads
            errors.append(error)
        finally:
            group.close()

    threads = [
        threading.Thread(target=main, args=(group,), name=f"rank-{group.rank}", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Part of what it sets is the process's, not the thread's.
    torch.set_num_threads(cores)
    if errors:
        raise next((e for e in errors if not isinstance(e, CollectiveTimeoutError)), errors[0])
    return [results[rank] for rank in range(size)]

"""Starting and shutting down, and the default group."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

import kernels
from collectives import validation
from collectives.bootstrap.launchers import local_ranks, world_size
from collectives.bootstrap.rendezvous import (
    agree_on_backend,
    keeps_store,
    start_torch_distributed,
)
from collectives.bootstrap.report import report
from collectives.bootstrap.settings import TIMEOUT, Settings, check_process_group
from collectives.bootstrap.transport_selection import (
    check_alone,
    connect,
    require_room,
    transport_choice,
)
from collectives.errors import CollectiveTimeoutError, TransportError
from collectives.execution.call import Call
from collectives.group import Group
from collectives.schedules.topology import Topology
from collectives.stall import warning_seconds
from collectives.transport import GlooTransport, ThreadWorld
from collectives.transport.process_groups import store_of, subgroup

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_group: Group | None = None
_settings = Settings()
_thread = threading.local()
_adopted: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def init(
    *,
    timeout: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    transport: str | None = None,
) -> Group:
    """Join the ranks that a launcher started and return their group; without one, one rank.

    It reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if set, LOCAL_RANK and
    LOCAL_WORLD_SIZE, as torchrun sets them. Where neither RANK nor WORLD_SIZE is set, it sets all
    of them by the variables of horovodrun, mpirun (Open MPI), mpiexec (PMI) or srun, the first that
    is found. If torch.distributed is initialised already, or with `process_group`, it uses those
    ranks. A second call returns the first one's group unless that was closed; what it gives must be
    what the first one gave, or had by default. Under `run_threads` it returns the thread's group.

    A rank that waits for others in a collective logs a WARNING after 60 seconds and each 60 more,
    or after as many as the environment variable ADASUM_STALL_WARNING_SECONDS says, 0 for never.

    Args:
        timeout: Seconds that any step of a collective may wait for a peer; 300 unless given.
        process_group: The torch.distributed process group whose ranks to use.
        transport: How CPU tensors travel. None reads the environment variable ADASUM_TRANSPORT,
            else "auto". It must be the same on all ranks.

            - "auto": shared memory between ranks of one host, TCP between hosts, gloo where neither
              works.
            - "gloo": gloo only.
            - "tcp": TCP only; an error if a rank can reach another by gloo only.
            - "shm": shared memory only; an error if any two ranks share none.
            - "nccl": CUDA tensors travel through cupy's NCCL on each rank's current device, CPU
              tensors as with "auto". Otherwise CUDA tensors travel over torch.distributed, where
              every rank of every host can have a GPU of its own.

    Returns:
        The default group.

    Raises:
        ValueError: The environment variables are incomplete or wrong, or do not say at which
            address ranks of several hosts meet; or `transport` is unknown, or
            ADASUM_STALL_WARNING_SECONDS no number. Or a second call gives another argument than
            the first: nothing is changed.
        RuntimeError: There is more than one rank but torch is built without torch.distributed, or
            ADASUM_CPU_KERNELS demands compiled kernels that are not available.
        CollectiveTimeoutError: Ranks did not arrive; the text names them.
        CollectiveMismatchError: Ranks differ in `transport`. Raised on all ranks.
        TransportError: `transport` is not available. Raised on all ranks. Or this process may not
            open as many files as there are ranks.
    """
    global _group, _settings
    given = Settings(timeout, process_group, transport)
    if (group := _open_group()) is not None:
        if group is _group:
            given.require_same(_settings)
        return group
    settings = given.checked()
    timeout, choice = settings.timeout or TIMEOUT, str(settings.transport)
    validation.no_mode("init's messages")
    # What these raise comes before anybody waits.
    warning_seconds()
    kernels.backend_info()
    # Else torch's communicators are ours.
    shares_gpu = process_group is not None or _distributed()
    gloo = _gloo(process_group, timeout, choice)
    if gloo is None:
        check_alone(choice)
        group = Group(ThreadWorld(1).transport(0), timeout=timeout, local_rank=0, local_size=1)
        _report(group, choice)
    else:
        start = Call("init", options={"transport": choice}, label="start-up")
        group = _over_gloo(gloo, timeout, start)
        group.transport.shares_gpu = shares_gpu
        atexit.register(shutdown)
    _group, _settings = group, settings
    return group


def _gloo(
    process_group: dist.ProcessGroup | None, timeout: float, choice: str
) -> GlooTransport | None:
    """Return what `init` starts from; None for a rank that is alone."""
    if process_group is not None:
        require_room(dist.get_world_size(process_group), None, choice, gloo=False)
        return GlooTransport(process_group)
    if _distributed():
        require_room(dist.get_world_size(), local_ranks()[1], choice, gloo=True)
        assert dist.group.WORLD is not None
        backend = _backend_of(dist.group.WORLD, timeout)
        whole = dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
    elif (size := world_size()) == 1:
        return None
    else:
        _require_distributed()
        store = keeps_store(int(os.environ["RANK"]))
        require_room(size, local_ranks()[1], choice, gloo=True, store=store)
        start_torch_distributed(timeout)
        whole = dist.group.WORLD
    return GlooTransport(whole, owned=True)


def _backend_of(process_group: dist.ProcessGroup, timeout: float) -> str:
    """Return the backend of a group of ours with the ranks of this one; all of them call it."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    return agree_on_backend(store_of(process_group), rank, size, timeout)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _require_distributed() -> None:
    if not dist.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} is built without torch.distributed, which ranks in "
            "processes of their own need: pip install a torch that has it, as PyPI's for Linux do, "
            "or use ranks that are threads (run_threads)"
        )


def new_group(ranks: Sequence[int]) -> Group | None:
    """Return a group of some of the default group's ranks, None on the others: `Group.split`."""
    return default_group().split(ranks)


def from_process_group(process_group: dist.ProcessGroup, *, timeout: float = TIMEOUT) -> Group:
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
    check_process_group(process_group)
    validation.timeout(timeout)
    group = _adopted.get(process_group)
    if group is None or group.closed:
        validation.no_mode("from_process_group's messages")
        # What these raise comes before anybody waits.
        choice = transport_choice(None)
        warning_seconds()
        kernels.backend_info()
        ranks = range(dist.get_world_size(process_group))
        require_room(len(ranks), None, choice, gloo=True)
        own = subgroup(process_group, ranks, _backend_of(process_group, timeout), timeout)
        members = dist.get_process_group_ranks(process_group)
        names = () if members == list(range(dist.get_world_size())) else members
        options = {"transport": choice}
        start = Call("from_process_group", options=options, label="start-up")
        group = _over_gloo(GlooTransport(own, owned=True, names=names), timeout, start)
        for each in (group, _group):
            if each is not None:
                each.transport.shares_gpu = True
        if not _adopted:
            atexit.register(_close_adopted)
        _adopted[process_group] = group
    return group


def _close_adopted() -> None:
    with ExitStack() as stack:
        for group in list(_adopted.values()):
            stack.callback(group.close)


def _over_gloo(gloo: GlooTransport, timeout: float, start: Call) -> Group:
    whole = gloo.size == dist.get_world_size()
    local_rank, local_size = local_ranks() if whole else (None, None)
    group = None
    try:
        group = Group(
            connect(gloo, timeout, start),
            timeout=timeout,
            local_rank=local_rank,
            local_size=local_size,
        )
        _report(group, start.options["transport"])
    except BaseException:
        (group or gloo).close()
        raise
    return group


def _report(group: Group, choice: str) -> None:
    """Log how the group works, where anybody wants to know."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(report(group.transport, choice, group.hosts, group.topology))


def shutdown() -> None:
    """Close the group that `init` made, if any: `Group.close`; `init` may be called again.

    Raises:
        TransportError: Asynchronous calls were lost; the text says how many.
    """
    global _group
    if _group is None:
        return
    group, _group = _group, None
    atexit.unregister(shutdown)
    group.close()


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
    groups = _thread_groups(size, timeout, size if local_size is None else local_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    cores = torch.get_num_threads()

    def main(group: Group) -> None:
        _thread.group = group
        # A new thread's BLAS would start as many threads as there are processors, in every rank.
        torch.set_num_threads(max(1, cores // size))
        try:
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001 - raised below, for all threads
            errors.append(error)
        try:
            group.close()
        except TransportError as error:
            # Most often since another rank has ended, whose error is raised.
            _logger.warning("rank %d: %s", group.rank, error)

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


def _thread_groups(size: int, timeout: float, local_size: int) -> list[Group]:
    """Return the groups of ranks that are threads, by rank."""
    validation.integer("size", size)
    validation.timeout(timeout)
    warning_seconds()
    world, topology = ThreadWorld(size), Topology(size, local_size)
    return [
        Group(
            world.transport(rank),
            timeout=timeout,
            local_rank=topology.local_rank_of(rank),
            local_size=local_size,
            topology=topology,
        )
        for rank in range(size)
    ]

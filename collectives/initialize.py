"""Start and shut down collectives, and keep the default group."""

from __future__ import annotations

import atexit
import logging
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
from collectives.bootstrap.rendezvous import agree_on_backend, start_torch_distributed
from collectives.bootstrap.transport_selection import (
    TIMEOUT,
    Settings,
    TransportName,
    check_alone,
    check_process_group,
    connect,
    report,
    transport_choice,
    version,
)
from collectives.call import Call
from collectives.errors import CollectiveTimeoutError, TransportError
from collectives.execution.all_reduce import staging_bytes
from collectives.group import Group
from collectives.recorder import begin
from collectives.schedules.topology import Topology
from collectives.stall import warning_seconds
from collectives.transport import GlooTransport, ThreadWorld
from collectives.transport.process_groups import store_of, subgroup

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# The group of `init` and its arguments, each thread's group under `run_threads`, and the groups of
# `from_process_group` (weak, so that destroyed process groups are not kept alive).
_group: Group | None = None
_settings = Settings()
_thread = threading.local()
_adopted: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def init(
    *,
    timeout: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    transport: TransportName | None = None,
) -> Group:
    """Join the ranks that a launcher started and return their group; one rank without a launcher.

    It reads the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if set,
    LOCAL_RANK and LOCAL_WORLD_SIZE. If neither RANK nor WORLD_SIZE is set, it sets all of these
    from the variables of horovodrun, mpirun (Open MPI), mpiexec (PMI) or srun, the first one found.
    If torch.distributed is initialised already, or with `process_group`, it uses those ranks. A
    second call returns the first call's group unless that was closed; if it has arguments, they
    must equal the first call's. Under `run_threads` it returns the thread's group.

    Ranks that wait for others log a WARNING every ADASUM_STALL_WARNING_SECONDS (60; 0 for never).
    They write their last calls to a file on an error, SIGUSR1 and SIGTERM (`dump_flight_record`),
    and if ADASUM_FLIGHT_FOLDER is set, on any rank's timeout.

    Args:
        timeout: Seconds that each step of a collective may wait for a peer; 300 by default.
        process_group: The torch.distributed process group whose ranks to use.
        transport: The transport of CPU tensors, the same on all ranks. Default: the environment
            variable ADASUM_TRANSPORT, or "auto".

            - "auto": shared memory between ranks of one host, otherwise torch.distributed's gloo.
            - "gloo": gloo only.
            - "shm": shared memory only; an error if any two ranks share no memory.
            - "nccl": CUDA tensors use cupy's NCCL on each rank's current device, CPU tensors are
              sent as with "auto". With the other transports, CUDA tensors use torch.distributed's
              NCCL, if every rank can have its own GPU, or ranks may share one (NCCL 2.30 or newer
              with NCCL_MULTI_RANK_GPU_ENABLE=1).

    Returns:
        The default group.

    Raises:
        ValueError: Environment variables are wrong or missing, `transport` is unknown, or an
            argument of a second call differs from the first call's; nothing is changed then.
        RuntimeError: There is more than one rank but torch is built without torch.distributed, or
            ADASUM_CPU_KERNELS demands compiled kernels that are not available.
        CollectiveTimeoutError: Ranks did not arrive; the text names them.
        CollectiveMismatchError: Ranks differ in `transport` or in the library's version. Raised on
            all ranks.
        TransportError: `transport` is not available (raised on all ranks), or this rank's system is
            out of memory, threads or file descriptors.

    Examples:
        >>> collectives.init().size  # started by torchrun, it is the number of ranks
        1
    """
    global _group, _settings
    given = Settings(timeout, process_group, transport)
    if (group := _open_group()) is not None:
        if group is _group:
            given.require_same(_settings)
        return group
    settings = given.checked()
    _group, _settings = _start(settings), settings
    return _group


def _start(settings: Settings) -> Group:
    """Return the group of `init`."""
    timeout, choice = settings.timeout or TIMEOUT, str(settings.transport)
    _check_environment("init")
    # If we start torch.distributed ourselves, only this group uses its communicators.
    shares_gpu = settings.process_group is not None or _distributed()
    gloo = _gloo(settings.process_group, timeout)
    if gloo is None:
        check_alone(choice)
        group = Group(ThreadWorld(1).transport(0), timeout=timeout, local_rank=0, local_size=1)
        begin(group._record, "init", [0])
        _report(group, choice)
        return group
    group = _over_gloo(gloo, timeout, "init", choice)
    group.transport.shares_gpu = shares_gpu
    atexit.register(shutdown)
    return group


def _check_environment(kind: str) -> None:
    """Raise errors of this process's environment, before any rank waits for others."""
    validation.no_mode(f"{kind}'s messages")
    # These raise errors for wrong settings.
    warning_seconds()
    staging_bytes()
    kernels.backend_info()


def _gloo(process_group: dist.ProcessGroup | None, timeout: float) -> GlooTransport | None:
    """Return the gloo transport for `init` to start from; None if there is only one rank."""
    if process_group is not None:
        return GlooTransport(process_group)
    if _distributed():
        assert dist.group.WORLD is not None
        backend = _backend_of(dist.group.WORLD, timeout)
        whole = dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
    elif world_size() == 1:
        return None
    else:
        _require_distributed()
        start_torch_distributed(timeout)
        whole = dist.group.WORLD
    return GlooTransport(whole, owned=True)


def _backend_of(process_group: dist.ProcessGroup, timeout: float) -> str:
    """Agree on the backend of a new process group with the ranks of this one; collective."""
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
    """Split the default group: return a group of some of its ranks; None on the others.

    Examples:
        >>> group = collectives.init()
        >>> collectives.new_group([0]).ranks
        (0,)
    """
    return default_group().split(ranks)


def from_process_group(process_group: dist.ProcessGroup, *, timeout: float = TIMEOUT) -> Group:
    """Return a group of the ranks of a torch.distributed process group, in its order.

    `init` is not needed. Exactly these ranks must call it. Messages use shared memory or a new
    process group, so that they do not mix with messages of the given one. A second call for the
    same process group returns the same Group unless that was closed.

    Args:
        process_group: The process group.
        timeout: Seconds that each step of a collective may wait for a peer.

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
        _check_environment("from_process_group")
        choice = transport_choice(None)
        ranks = range(dist.get_world_size(process_group))
        own = subgroup(process_group, ranks, _backend_of(process_group, timeout), timeout)
        members = dist.get_process_group_ranks(process_group)
        names = () if members == list(range(dist.get_world_size())) else members
        gloo = GlooTransport(own, owned=True, names=names)
        group = _over_gloo(gloo, timeout, "from_process_group", choice)
        # The process group's owner uses torch's NCCL on the same GPU, and `init`'s group may, too.
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


def _over_gloo(gloo: GlooTransport, timeout: float, kind: str, choice: str) -> Group:
    """Return the group for `init` or `from_process_group`; collective."""
    # LOCAL_RANK counts all ranks of the host, not only the ranks of a smaller group.
    whole = gloo.size == dist.get_world_size()
    local_rank, local_size = local_ranks() if whole else (None, None)
    group = None
    try:
        options = {"version": version(), "transport": choice, "ADASUM_NODE_MEMORY": staging_bytes()}
        start = Call(kind, options=options, label="start-up")
        transport = connect(gloo, timeout, start)
        group = Group(transport, timeout=timeout, local_rank=local_rank, local_size=local_size)
        begin(group._record, kind, dist.get_process_group_ranks(gloo.process_group))
        _report(group, choice)
    except BaseException:
        (group or gloo).close()
        raise
    return group


def _report(group: Group, choice: str) -> None:
    """Log the group's transport, algorithms and kernels, at level INFO."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(report(group.transport, choice, group.hosts, group.topology))


def shutdown() -> None:
    """Close the group that `init` made, if any (`Group.close`). `init` may then be called again.

    Raises:
        TransportError: Asynchronous calls were lost; the text has their number.

    Examples:
        >>> group = collectives.init()
        >>> collectives.shutdown()
        >>> collectives.is_initialized()
        False
    """
    global _group
    if _group is None:
        return
    # Cleared before closing, so that it is no longer the default group even if closing raises.
    group, _group = _group, None
    atexit.unregister(shutdown)
    group.close()


def _open_group() -> Group | None:
    """Return this thread's group under `run_threads`, or `init`'s if it was not closed."""
    own: Group | None = getattr(_thread, "group", None)
    if own is not None or _group is None or _group.closed:
        return own
    return _group


def is_initialized() -> bool:
    """Return whether this thread has a default group that is open.

    Examples:
        >>> group = collectives.init()
        >>> collectives.is_initialized()
        True
    """
    return _open_group() is not None


def default_group() -> Group:
    """Return the group of `init`, or of this thread under `run_threads`.

    Raises:
        RuntimeError: There is no such group, or it was closed.

    Examples:
        >>> group = collectives.init()
        >>> collectives.default_group() is group
        True
    """
    group = _open_group()
    if group is None:
        raise RuntimeError("no open group: call adasum.init() or collectives.init() first")
    return group


def run_threads(
    size: int, fn: Callable[[Group], T], *, timeout: float = 60.0, local_size: int | None = None
) -> list[T]:
    """Run `fn(group)` on ranks that are threads of this process; return the results by rank.

    The default group of each thread is its rank's group. The ranks share torch's threads: each may
    use an n-th of them. They also share torch's global random generator, in no fixed order: use a
    torch.Generator per rank to get the same numbers in every run.

    Args:
        size: Number of ranks.
        fn: Called once per rank.
        timeout: Seconds that each step of a collective may wait for a peer.
        local_size: Ranks per simulated node; None for all on one node.

    Raises:
        ValueError: `local_size` does not divide `size`.
        BaseException: The error of the rank that failed first, when all threads have ended. Other
            ranks' collectives fail once they need an ended rank.

    Examples:
        >>> collectives.run_threads(3, lambda group: group.rank)
        [0, 1, 2]
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of a Group, got {type(fn).__name__}")
    groups = _thread_groups(size, timeout, size if local_size is None else local_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    cores = torch.get_num_threads()

    def main(group: Group) -> None:
        _thread.group = group
        # In each new thread BLAS would otherwise use as many threads as there are processors.
        torch.set_num_threads(max(1, cores // size))
        try:
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001 - raised below, for all threads
            errors.append(error)
        try:
            group.close()
        except TransportError as error:
            # Usually another rank has ended; its error is raised below.
            _logger.warning("rank %d: %s", group.rank, error)

    threads = [
        threading.Thread(target=main, args=(group,), name=f"rank-{group.rank}", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The ranks' set_num_threads has also changed settings of the whole process.
    torch.set_num_threads(cores)
    # Timeouts are usually consequences of another rank's error: raise that one.
    if errors:
        raise next((e for e in errors if not isinstance(e, CollectiveTimeoutError)), errors[0])
    return [results[rank] for rank in range(size)]


def _thread_groups(size: int, timeout: float, local_size: int) -> list[Group]:
    """Return the groups of ranks that are threads, by rank."""
    validation.integer("size", size)
    validation.timeout(timeout)
    warning_seconds()
    topology, world = Topology(size, local_size), ThreadWorld(size)
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

"""Process groups of torch.distributed: parts of them, their timeouts and ends.

`dist.new_group` with `use_local_synchronization=True` names a group by how many this process is in
already, which differs between ranks that are in different groups: they would wait for each other
under different names. Here the name follows from what all members know. torch offers no public way
to make a group under a given name, nor to abort its NCCL.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError

# None in a torch built without torch.distributed, which makes no process groups either.
_c10d: Any = getattr(dist, "distributed_c10d", None)

_ABORT_SECONDS = 3.0
_LAZY = "TORCH_GLOO_LAZY_INIT"
# What torch and gloo say of a system that gives no more memory, threads or descriptors.
_OUT = (
    os.strerror(errno.ENOMEM),
    os.strerror(errno.EAGAIN),
    os.strerror(errno.EMFILE),
    "can't allocate memory",
    "can't start new thread",
    "bad_alloc",
)


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store through which the ranks of a process group found each other.

    Raises:
        TransportError: The process group was destroyed.
    """
    if process_group not in _c10d._world.pg_map:
        raise TransportError(
            "the process group of torch.distributed that ranks are found through was destroyed: "
            "split groups before destroy_process_group, or call shutdown() and init() again"
        )
    store: dist.Store = _c10d._world.pg_map[process_group][1]
    return store


def subgroup(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    backend: str,
    timeout: float,
    *,
    lazy: bool = False,
) -> dist.ProcessGroup:
    """Make a process group of some ranks of another; its messages are its own.

    Called by exactly these ranks, by all of them in one order where they make several.

    Args:
        parent: The other process group.
        ranks: Ranks of `parent`, in the new order.
        backend: As `dist.new_group` takes it.
        timeout: Seconds, for making it and for each operation on it.
        lazy: Whether gloo connects two ranks when they first exchange something over it, and not
            all of them now; where torch does that.

    Raises:
        CollectiveTimeoutError: A rank does not come, or the ranks' store has ended.
        TransportError: `parent` was destroyed, or this rank's system gives no more memory.
    """
    store = store_of(parent)
    names = [dist.get_global_rank(parent, rank) for rank in ranks]
    key = f"adasum {'-'.join(map(str, names))}"
    try:
        # Each rank counts for itself, and all make their groups in one order.
        count = store.add(f"{key} made by {dist.get_rank()}", 1)
        with _lazy_gloo() if lazy else nullcontext():
            made, _ = _c10d._new_process_group_helper(
                len(names),
                names.index(dist.get_rank()),
                names,
                dist.Backend(backend),
                store,
                cast(Any, f"{parent.group_name} {key} {count}"),
                timeout=timedelta(seconds=timeout),
            )
    except RuntimeError as error:
        said = f"rank {dist.get_rank()} could not make a group with ranks {names}"
        raise failed(said, error) from error
    _c10d._world.pg_group_ranks[made] = {name: rank for rank, name in enumerate(names)}
    return made


@contextmanager
def _lazy_gloo() -> Iterator[None]:
    """Let gloo connect lazily, which torch takes from the environment alone.

    Not where the user has said otherwise.
    """
    if _LAZY in os.environ:
        yield
        return
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LAZY, None)


def _nccl_of(process_group: dist.ProcessGroup) -> Any:
    """Return torch's own NCCL in a process group; None where it has none."""
    if not dist.is_nccl_available() or torch.device("cuda") not in process_group._device_types:
        return None
    backend: Any = process_group._get_backend(torch.device("cuda"))
    # One in another with TORCH_DISTRIBUTED_DEBUG=DETAIL.
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def has_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group reduces CUDA tensors by NCCL."""
    return "cuda:nccl" in dist.get_backend_config(process_group)


def extend_timeout(process_group: dist.ProcessGroup) -> None:
    """Give operations of torch's own NCCL a minute more than the group's timeout.

    When that is over torch's watchdog ends the process; a step's own timeout is an error before.
    """
    backend = _nccl_of(process_group)
    if backend is not None:
        backend._set_default_timeout(backend.options._timeout + timedelta(seconds=60))


def abort_nccl(process_group: dist.ProcessGroup) -> str:
    """Abort all that is under way over torch's own NCCL; return how that went, for an error's text.

    Not the communicator of one operation, as its `wait(timeout)` does: torch's watchdog takes that
    for a failure of NCCL's and ends the process a minute later.
    """
    backend = _nccl_of(process_group)
    if backend is None:
        return "it is still under way"
    # torch gives it as long as an operation, and it may wait for the host's other ranks.
    thread, errors = run_beside(backend.abort, "nccl-abort", _ABORT_SECONDS)
    if errors:
        return f"NCCL could not be aborted: {first_line(errors[0])}"
    return "NCCL is being aborted" if thread.is_alive() else "NCCL was aborted"


def run_beside(
    job: Callable[[], object], name: str, timeout: float
) -> tuple[threading.Thread, list[BaseException]]:
    """Run what may never end, for `timeout` seconds; return its thread, and what it raised so far.

    Not a pool's thread, which the interpreter would wait for at exit.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - for the caller
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout)
    return thread, errors


def failed(said: str, error: BaseException) -> CollectiveError:
    """Return the error for what torch.distributed raised: no timeout where a rank has no memory.

    Args:
        said: Whom this rank waited for, and in what.
        error: What torch raised.
    """
    text = first_line(error)
    if any(out.lower() in text.lower() for out in _OUT):
        return TransportError(
            f"{said}: this rank's system has no memory, threads or descriptors left ({text}); "
            "raise its limits (ulimit -v, -u, -n, or the container's), or start fewer ranks on it"
        )
    return CollectiveTimeoutError(f"{said}: {text}")


def first_line(error: BaseException) -> str:
    """Return what an error of torch's says, without its C++ stack."""
    return str(error).strip().split("\n", 1)[0]


def leave(process_group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless torch.distributed was ended before."""
    if dist.is_initialized() and process_group in _c10d._world.pg_map:
        dist.destroy_process_group(process_group)

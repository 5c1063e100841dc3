"""Process groups of torch.distributed, and the messages of CPU tensors over their gloo.

`dist.new_group` with `use_local_synchronization=True` derives a group's name from the number of
groups that the process is in. Ranks that are in different groups would then wait for each other
under different names. Here the name follows from information that all members have. torch has no
public function that makes a group with a given name or aborts its NCCL.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.stall import Stall
from collectives.transport.base import Messages, Transport, as_bytes

# None if torch was built without torch.distributed; then there are no process groups either.
_c10d: Any = getattr(dist, "distributed_c10d", None)

# Every rank is to raise its error within 5 s after the timeout; this leaves some time of those.
_ABORT_SECONDS = 3.0
# torch's watchdog ends the process so much later than our own timeouts.
_WATCHDOG_SECONDS = 60.0
_LAZY = "TORCH_GLOO_LAZY_INIT"
# Parts of torch's and gloo's errors when the system has no memory, threads or descriptors left.
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

    TransportError if the process group was destroyed.
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
    """Make a process group of some ranks of another one; their messages do not mix.

    A collective of exactly these ranks, which make several groups in the same order. With `lazy`,
    gloo connects two ranks at their first message, instead of all ranks now, if this version of
    torch can. CollectiveTimeoutError if one does not take part or the ranks' store has ended;
    TransportError if `parent` was destroyed or memory is short.
    """
    store = store_of(parent)
    names = [dist.get_global_rank(parent, rank) for rank in ranks]
    key = f"adasum {'-'.join(map(str, names))}"
    try:
        # The count tells apart groups of the same ranks. Each rank has its own counter: all make
        # their groups in the same order, so the counters agree.
        count = store.add(f"{key} made by {dist.get_rank()}", 1)
        with _lazy_gloo() if lazy else nullcontext(), _without_split():
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
    if made.name() == "undefined":
        # torch sets no default if another backend is registered, as ours is, and then warns about
        # it when the group is destroyed.
        made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _c10d._world.pg_group_ranks[made] = {name: rank for rank, name in enumerate(names)}
    return made


@contextmanager
def _without_split() -> Iterator[None]:
    """Return a context that makes torch create new communicators instead of splitting one.

    If `init_process_group` was given a device_id, torch would split the default group's
    communicator, and the ranks outside of the new group would have to take part.
    """
    whole: Any = dist.group.WORLD
    device = whole.bound_device_id
    whole.bound_device_id = None
    try:
        yield
    finally:
        whole.bound_device_id = device


@contextmanager
def _lazy_gloo() -> Iterator[None]:
    """Return a context that makes gloo connect lazily, unless the user has set the variable.

    torch reads this setting from the environment only.
    """
    if _LAZY in os.environ:
        yield
        return
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LAZY, None)


def new_nccl(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, members: Sequence[int]
) -> Any:
    """Return torch's NCCL backend of some ranks, in no process group; its first use connects them.

    Args:
        store: A store that only these ranks use.
        rank: This rank's number among them.
        size: How many ranks there are.
        timeout: torch's watchdog ends the process after it.
        name: Its name in torch's records.
        members: The ranks' numbers in torch.distributed.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.group_name = timeout, name
    options.global_ranks_in_group = list(members)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def own_nccl(parent: dist.ProcessGroup, timeout: float) -> Any:
    """Return our own NCCL backend for a process group's ranks.

    All ranks make their groups in the same order. torch.distributed does not know this backend:
    `destroy_process_group` would destroy its communicators, and wait for ever if a CUDA graph holds
    them.
    """
    store, rank = store_of(parent), dist.get_rank(parent)
    key = f"adasum nccl {parent.group_name}"
    # As in `subgroup`.
    key = f"{key} {store.add(f'{key} made by {rank}', 1)}"
    members = dist.get_process_group_ranks(parent)
    store, late = dist.PrefixStore(key, store), timedelta(seconds=timeout + _WATCHDOG_SECONDS)
    return new_nccl(store, rank, len(members), late, key, members)


def nccl_of(process_group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of a process group, if any."""
    if not dist.is_nccl_available() or torch.device("cuda") not in process_group._device_types:
        return None
    backend: Any = process_group._get_backend(torch.device("cuda"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in others.
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def has_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group reduces CUDA tensors by NCCL."""
    return "cuda:nccl" in dist.get_backend_config(process_group)


def extend_timeout(process_group: dist.ProcessGroup) -> None:
    """Add a minute to the timeout of torch's NCCL.

    At that timeout torch's watchdog ends the process. With the added minute, our own step times out
    first, with an error that can be handled.
    """
    backend = nccl_of(process_group)
    if backend is not None:
        longer = timedelta(seconds=_WATCHDOG_SECONDS)
        backend._set_default_timeout(backend.options._timeout + longer)


def abort_nccl(backend: Any) -> str:
    """Abort all operations of torch's NCCL, if any; return the outcome, for an error's text.

    `wait(timeout)` of one operation would abort its communicator, but torch's watchdog would take
    that for a failure of NCCL and end the process a minute later.
    """
    if backend is None:
        return "it is still under way"
    # Bounded: an abort may wait for the host's other ranks as long as an operation may.
    thread, errors = run_beside(backend.abort, "nccl-abort", _ABORT_SECONDS)
    if errors:
        return f"NCCL could not be aborted: {first_line(errors[0])}"
    return "NCCL is being aborted" if thread.is_alive() else "NCCL was aborted"


def run_beside(
    job: Callable[[], object], name: str, timeout: float
) -> tuple[threading.Thread, list[BaseException]]:
    """Run a job that may never end in a thread, and wait for it for `timeout` seconds.

    The thread may still be running afterwards. It is not from a pool: at exit the interpreter would
    wait for a pool's threads. The job's error, if any, is added to the returned list.
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


def failed(said: str, error: BaseException) -> CollectiveError | OSError:
    """Return our error for an error of torch.distributed: a timeout, unless this rank is at fault.

    said: The beginning of the text, which names the step and the rank that this rank waited for.
    """
    text = first_line(error)
    if os.strerror(errno.EFAULT) in text:
        # Not a CollectiveTimeoutError: this rank is at fault, not a peer.
        return OSError(
            errno.EFAULT,
            "this rank's own tensor has memory that cannot be read or written, such as that of a "
            f"mapped file that was truncated ({text})",
        )
    if any(out.lower() in text.lower() for out in _OUT):
        return TransportError(
            f"{said}: this rank's system has no memory, threads or descriptors left ({text}); "
            "raise its limits (ulimit -v, -u, -n, or the container's), or start fewer ranks on it"
        )
    return CollectiveTimeoutError(f"{said}: {text}")


def first_line(error: BaseException) -> str:
    """Return the first line of torch's error, without the C++ stack below it."""
    return str(error).strip().split("\n", 1)[0]


def leave(process_group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless it was destroyed already."""
    if dist.is_initialized() and process_group in _c10d._world.pg_map:
        dist.destroy_process_group(process_group)


class GlooTransport(Transport):
    """Messages of CPU tensors over a process group, which `close` destroys if it is `owned`."""

    process_group: dist.ProcessGroup
    symmetric_memory = None

    def __init__(
        self, process_group: dist.ProcessGroup, *, owned: bool = False, names: Sequence[int] = ()
    ) -> None:
        self.names = names
        self.process_group = process_group
        self._owned = owned
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._config = dist.get_backend_config(process_group)
        # The backend of each device type, such as "cpu:gloo,cuda:nccl".
        parts = [part.split(":", 1) for part in self._config.split(",")]
        self._backends = {part[0]: part[-1] for part in parts if len(part) == 2}
        if self._backends.get("cpu") != "gloo":
            raise ValueError(
                f"process_group must carry CPU tensors over gloo, its backends are "
                f'{self._backends}: make it with backend="gloo" or "cpu:gloo,cuda:nccl"'
            )
        if owned:
            extend_timeout(process_group)

    def __repr__(self) -> str:
        return "GlooTransport()"

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(
                f"tensor is on {device}, which this process group's backends "
                f"({self._backends}) do not carry; move it to the CPU, or initialise "
                'torch.distributed with backend="cpu:gloo,cuda:nccl"'
            )

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        self.post(sends, recvs, step, timeout)()

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Start an `exchange`, which gloo's thread carries out; the function waits for it."""
        start = time.monotonic()
        posted: list[tuple[int, dist.Work]] = []
        peer = self.rank
        try:
            for post, messages in (
                (self.process_group.recv, recvs),
                (self.process_group.send, sends),
            ):
                for peer, tensor in messages:
                    if tensor.numel():
                        posted.append((peer, post([as_bytes(tensor)], peer, 0)))
        except RuntimeError as error:
            raise self._error(peer, step, start, timeout, error) from error
        return partial(self._wait, posted, step, start, timeout)

    def _wait(
        self, posted: Sequence[tuple[int, dist.Work]], step: str, start: float, timeout: float
    ) -> None:
        peer = self.rank
        stall = Stall(self.name(self.rank), step, timeout, lambda: self.named([peer]))
        try:
            with stall.within():
                # `stall` and the error name the rank in the loop's variable.
                for peer, work in posted:  # noqa: B007
                    left = max(start + timeout - time.monotonic(), 1e-3)
                    work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise self._error(peer, step, start, timeout, error) from error
        self.check_interrupt(step)

    def _error(
        self, peer: int, step: str, start: float, timeout: float, error: RuntimeError
    ) -> CollectiveError | OSError:
        """Return our error for an error of gloo while this rank waited for a peer."""
        return failed(
            f"{self.me} got no answer from {self.named([peer])} in {step} (stopped after "
            f"{time.monotonic() - start:.1f} s of {timeout:g} s)",
            error,
        )

    def split(self, ranks: Sequence[int], timeout: float) -> GlooTransport:
        # Lazy: with faster connections gloo is seldom used, and would otherwise connect all ranks.
        part = subgroup(self.process_group, ranks, self._config, timeout, lazy=True)
        return GlooTransport(part, owned=True, names=tuple(map(self.name, ranks)))

    def close(self) -> None:
        if self._owned:
            leave(self.process_group)

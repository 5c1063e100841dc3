"""Rendezvous: how ranks find each other, through one store at an address that all have."""

from __future__ import annotations

import atexit
import errno
import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from collectives.bootstrap.launchers import can_use_nccl, job, local_ranks
from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.transport.process_groups import failed, first_line, run_beside

# Seconds for a thread to leave torch's code, where torch takes longer than it was given: it may
# lose a connection that it waited on, pause, and try another one for the whole time.
_LEAVE_SECONDS = 5.0
_logger = logging.getLogger(__name__)
# The address of the store that this process has opened, and the store.
_opened: tuple[str, dist.Store] | None = None


def start_torch_distributed(timeout: float) -> None:
    """Start torch.distributed from the environment, any number of times in one process.

    Raises:
        CollectiveTimeoutError: Ranks, or the store, do not answer in time.
        TransportError: Rank 0's port is taken, or this rank's system gives no more memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Enough for torch to end by itself, and to say more about it.
    bounded(lambda: _start(rank, size, timeout), rank, timeout + 3.0)


def _start(rank: int, size: int, timeout: float) -> None:
    """Start it, by a store that outlives a shutdown.

    On a new store at the old port, a quick rank could find the old one. Each start has its own part
    of the store. Another address or port opens another store.
    """
    global _opened
    deadline = time.monotonic() + timeout
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if _opened is None or _opened[0] != address:
        # One at another address of the same port is let go of first: torch knows them by the port.
        _opened = None
        _opened = address, open_store(rank, timeout)
    try:
        store = wait_for_ranks(_opened[1], rank, size, deadline - time.monotonic())
        dist.init_process_group(
            agree_on_backend(store, rank, size, deadline - time.monotonic()),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        # Rank 0 lets go of the port, too.
        _opened = None
        if isinstance(error, CollectiveError):
            raise
        others = ", ".join(f"rank {peer}" for peer in range(size) if peer != rank)
        raise failed(f"rank {rank} could not connect to all of {others}", error) from error


def open_store(rank: int, timeout: float) -> dist.Store:
    """Open the store at MASTER_ADDR and MASTER_PORT: torchrun's, else rank 0's own.

    As torch's "env://", but it does not wait for the other ranks: `wait_for_ranks` does, and can
    tell who is missing. And a store of rank 0's own listens at MASTER_ADDR alone where that is an
    address of this host; else, with a WARNING, at every address.

    Args:
        rank: This rank.
        timeout: Seconds.

    Raises:
        CollectiveTimeoutError: There is no store in time.
        TransportError: The port is taken.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    keeps = keeps_store(rank)
    try:
        if keeps:
            _await(lambda left: socket.getaddrinfo(host, port), timeout)
        else:
            _await(lambda left: socket.create_connection((host, port), left).close(), timeout)
        listening = listen_at(host, port) if keeps else None
        return dist.TCPStore(
            host,
            port,
            is_master=keeps,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            # As torch's own, so that torch can open one there, too.
            multi_tenant=True,
            # Torch closes it.
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except (dist.DistError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise TransportError(
                f"rank {rank} cannot listen on {address}, where all ranks look for the store: "
                "something else does already; set another MASTER_PORT on all ranks"
            ) from error
        raise CollectiveTimeoutError(
            f"rank {rank} got no answer from the store at {address}, which rank 0 or torchrun "
            f"keeps, within {timeout:g} s: {first_line(error)}"
        ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """Listen at a host's address; None where torch has to at every one, which is a WARNING.

    Or where it has to find out what has the port: something else, or this process's own store.
    """
    why = f"{host} is no address of this host"
    for family, _, _, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not _is_loopback(host) and _is_loopback(str(at[0])):
            # As /etc/hosts often has it for a host's own name; other hosts know another address.
            local_size = local_ranks()[1]
            if local_size is None or local_size < int(os.environ.get("WORLD_SIZE", 0)):
                why = f"{host} is {at[0]} on this host, where no other host reaches it"
                continue
        try:
            return socket.create_server(at, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno != errno.EADDRNOTAVAIL:
                why = f"it cannot listen at {at[0]} alone ({error.strerror})"
    _logger.warning(
        "rank 0 listens on port %d of every network interface, where whoever reaches it can read "
        "and change what ranks tell each other at start-up: MASTER_ADDR %s; set it to an address "
        "of rank 0's host, or let only the job's hosts reach the port",
        port,
        why,
    )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def keeps_store(rank: int) -> bool:
    """Return whether a rank keeps the store, which else torchrun does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _await(attempt: Callable[[float], object], timeout: float) -> None:
    """Return once `attempt(seconds left)` does; raise its last OSError where it does not in time.

    torch tries by itself, too, but pauses for seconds between two tries, beyond its timeout, and
    logs a page about each.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    while True:
        left = deadline - time.monotonic()
        try:
            attempt(max(left, 0.1))
            return
        except OSError:
            if left <= 0:
                raise
        time.sleep(min(pause, max(left, 0)))
        pause = min(2 * pause, 0.25)


def bounded(start: Callable[[], None], rank: int, timeout: float) -> None:
    """Run `start`; CollectiveTimeoutError where it neither ends nor raises in `timeout` seconds.

    torch waits without a limit for the first answer of what listens at a store's port, and, after a
    wait has timed out, for the store to note that: both where the store's process was stopped, the
    first also where something else has its port.
    """
    thread, errors = run_beside(start, "collectives-start", timeout)
    if thread.is_alive():
        # An interpreter aborts where a thread leaves torch's code while it ends.
        atexit.register(thread.join, _LEAVE_SECONDS)
        raise CollectiveTimeoutError(
            f"rank {rank} could not start within {timeout:g} s: what listens at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} is not the store that rank 0 "
            "or torchrun keeps, or that has stopped"
        )
    if errors:
        raise errors[0]


def wait_for_ranks(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Return a part of the store for this start alone, once all ranks are there.

    A store may outlive ranks: torchrun keeps one over its restarts, with what those before wrote.
    So every rank writes a new token, and the ranks confirm a name made of all tokens that they see.
    Whoever has confirmed a name that holds another's token was started together with it; a name
    that holds a dead rank's token is confirmed by all but that rank.

    Raises:
        CollectiveTimeoutError: Names the ranks that have not come in `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    # Ranks of another job that was given the same address do not meet these.
    tokens = [f"adasum{job()}: rank {peer}" for peer in range(size)]
    names: list[str] = []
    pause = 0.001
    with _ended_store_is_a_timeout(rank):
        store.set(tokens[rank], secrets.token_hex(16))
        while True:
            # The oldest first: a rank that is done with this start may have begun another.
            for name in names:
                if store.check(_confirmations(name, size)):
                    return dist.PrefixStore(name, store)
            if store.check(tokens):
                seen = b" ".join(store.multi_get(tokens))
                name = f"adasum {hashlib.blake2b(seen, digest_size=16).hexdigest()}"
                if name not in names:
                    store.set(_confirmations(name, size)[rank], "")
                    names.append(name)
                    continue
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        raise _missing(store, _confirmations(names[-1], size) if names else tokens, rank, timeout)


def agree_on_backend(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Return gloo, and NCCL where every rank can use that; a collective of the store's ranks.

    Hosts may have other numbers of GPUs: a rank that had NCCL would wait for one that has not.

    Args:
        store: Of these ranks.
        rank: This rank.
        size: Number of ranks.
        timeout: Seconds that the others may take.

    Raises:
        CollectiveTimeoutError: Names the ranks that do not come.
    """
    # Each rank counts for itself, and all come here in one order.
    with _ended_store_is_a_timeout(rank):
        key = f"adasum backend {store.add(f'adasum backend: rank {rank}', 1)}"
        able = can_use_nccl(dist.get_world_size() if dist.is_initialized() else size)
        answers = [f"{key}: rank {peer}" for peer in range(size)]
        store.set(answers[rank], "nccl" if able else "gloo")
        try:
            store.wait(answers, timedelta(seconds=max(timeout, 1e-3)))
        except dist.DistStoreError:
            raise _missing(store, answers, rank, timeout) from None
        every = set(store.multi_get(answers)) == {b"nccl"}
    return "cpu:gloo,cuda:nccl" if every else "gloo"


@contextmanager
def _ended_store_is_a_timeout(rank: int) -> Iterator[None]:
    """Raise the errors of a store that has ended as a CollectiveTimeoutError that says so."""
    try:
        yield
    except dist.DistError as error:
        raise CollectiveTimeoutError(
            f"rank {rank} could not start: the store, which rank 0 or torchrun keeps, has ended "
            f"(look at rank 0's own error): {first_line(error)}"
        ) from error


def _missing(store: dist.Store, keys: list[str], rank: int, timeout: float) -> CollectiveError:
    """Return the error that names the ranks whose keys, one a rank, are not in the store."""
    missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
    late = ", ".join(f"rank {peer}" for peer in missing) or "another rank"
    return CollectiveTimeoutError(
        f"rank {rank} could not start: {late} did not come within {timeout:.3g} s"
    )


def _confirmations(name: str, size: int) -> list[str]:
    return [f"{name}: rank {peer}" for peer in range(size)]

"""Rendezvous: ranks find each other through a store with an address that all of them know."""

from __future__ import annotations

import atexit
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from collectives.bootstrap.launchers import gpu_for_nccl
from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.transport.process_groups import failed, first_line, run_beside

# The interpreter's longest wait, at exit, for a thread that is still in torch's code: torch may
# exceed its timeout, since it starts the timeout again after it has reconnected.
_LEAVE_SECONDS = 5.0
# The address of the store that this process has opened, and the store; kept after shutdown.
_opened: tuple[str, dist.Store] | None = None


def start_torch_distributed(timeout: float) -> None:
    """Start torch.distributed from the environment; processes may do so repeatedly.

    Raises:
        CollectiveTimeoutError: Ranks, or the store, do not answer in time.
        TransportError: Rank 0's port is taken, or this rank's system is out of memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # 3 s more, so that torch's own timeout, which has a better error, comes first.
    bounded(lambda: _start(rank, size, timeout), rank, timeout + 3.0)


def _start(rank: int, size: int, timeout: float) -> None:
    """Start torch.distributed with a store that is kept after shutdown.

    If each start opened a new store at the old port, an early rank could still find the old one.
    Only another address or port opens another store.
    """
    global _opened
    deadline = time.monotonic() + timeout
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if _opened is None or _opened[0] != address:
        # Close the old store first: torch shares stores with the same port, for any address.
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
        # On rank 0 this also frees the port.
        _opened = None
        if isinstance(error, CollectiveError):
            raise
        others = ", ".join(f"rank {peer}" for peer in range(size) if peer != rank)
        raise failed(f"rank {rank} could not connect to all of {others}", error) from error


def open_store(rank: int, timeout: float) -> dist.Store:
    """Open the store at MASTER_ADDR and MASTER_PORT: torchrun's if there is one, or rank 0's.

    Unlike torch's "env://" it does not wait for the other ranks: `wait_for_ranks` does, and names
    missing ones. Raises CollectiveTimeoutError if no store answers in time, TransportError if the
    port is taken.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if keeps:
            _repeat(lambda left: socket.getaddrinfo(host, port), timeout)
        else:
            _repeat(lambda left: socket.create_connection((host, port), left).close(), timeout)
        listening = _listen_at(host, port) if keeps else None
        return dist.TCPStore(
            host,
            port,
            is_master=keeps,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            # As in torch's "env://", so that torch can open the same store again in this process.
            multi_tenant=True,
            # Detached: torch now owns the descriptor, and closes it.
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except (dist.DistError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise TransportError(
                f"rank {rank} cannot listen on {host}:{port}, where all ranks look for the store: "
                "something else does already; set another MASTER_PORT on all ranks"
            ) from error
        raise CollectiveTimeoutError(
            f"rank {rank} got no answer from the store at {host}:{port}, which rank 0 or torchrun "
            f"keeps, within {timeout:g} s: {first_line(error)}"
        ) from error


def _listen_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens only at the given address of this host, if it is numeric.

    None for a name, since other hosts may know it by another address, and if the system refuses:
    torch then listens at every address, or raises the error.
    """
    with suppress(OSError, ValueError):
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        return socket.create_server((str(address), port), family=family, backlog=socket.SOMAXCONN)
    return None


def _repeat(attempt: Callable[[float], object], timeout: float) -> None:
    """Repeat `attempt(seconds left)` until it succeeds; after the timeout raise its last OSError.

    torch also retries, but it pauses for seconds between attempts, exceeds its timeout, and logs a
    page per attempt.
    """
    deadline = time.monotonic() + timeout
    # Doubled up to 0.25 s: ranks often start together, but a late one must not get many requests.
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
    """Run `start` in a thread; raise CollectiveTimeoutError if it exceeds `timeout` seconds.

    torch waits without a limit for a store's first answer and, after a timeout, for the store's
    acknowledgement. Both never come if the store's process was stopped (SIGSTOP), and there is no
    first answer if another program has the port.
    """
    thread, errors = run_beside(start, "collectives-start", timeout)
    if thread.is_alive():
        # Python aborts the process if a thread returns from torch's code while it shuts down.
        atexit.register(thread.join, _LEAVE_SECONDS)
        raise CollectiveTimeoutError(
            f"rank {rank} could not start within {timeout:g} s: what listens at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} is not the store that rank 0 "
            "or torchrun keeps, or that has stopped"
        )
    if errors:
        raise errors[0]


def wait_for_ranks(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Wait until all ranks are there; return a part of the store that only this start uses.

    The store may outlive ranks: torchrun keeps it over restarts, with the entries of earlier ranks.
    So every rank writes a new random token, and confirms a name, the hash of all tokens that it
    sees. The start is complete when all ranks have confirmed the same name. If a name includes the
    token of a dead rank, it stays incomplete, since that rank cannot confirm it. After `timeout`
    seconds a CollectiveTimeoutError names the ranks that have not come.
    """
    deadline, pause = time.monotonic() + timeout, 0.001
    tokens = [f"adasum: rank {peer}" for peer in range(size)]
    names: list[str] = []
    with _ended_store_is_a_timeout(rank):
        store.set(tokens[rank], secrets.token_hex(16))
        while True:
            # The oldest first: another rank may have finished this start and begun the next one
            # with a new token, which changes the name.
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
    """Return gloo, with NCCL if every rank has a GPU for it; a collective of the store's ranks.

    Hosts may have different GPUs: ranks with NCCL would wait forever for ranks without. A
    CollectiveTimeoutError names missing ranks.
    """
    # The count distinguishes several agreements on one store. Each rank has its own counter: all
    # ranks call this in the same order, so the counters agree.
    with _ended_store_is_a_timeout(rank):
        key = f"adasum backend {store.add(f'adasum backend: rank {rank}', 1)}"
        gpu = gpu_for_nccl(rank, dist.get_world_size() if dist.is_initialized() else size)
        answers = [f"{key}: rank {peer}" for peer in range(size)]
        # JSON as in earlier versions, so that ranks of different versions reach the comparison of
        # versions.
        store.set(answers[rank], json.dumps(None if gpu is None else [gpu] if gpu else []))
        try:
            store.wait(answers, timedelta(seconds=max(timeout, 1e-3)))
        except dist.DistStoreError:
            raise _missing(store, answers, rank, timeout) from None
        gpus = [answer for answer in store.multi_get(answers) if answer != b"[]"]
    return "gloo" if b"null" in gpus or len({*gpus}) < len(gpus) else "cpu:gloo,cuda:nccl"


@contextmanager
def _ended_store_is_a_timeout(rank: int) -> Iterator[None]:
    """Replace torch's error by a CollectiveTimeoutError if the store has ended."""
    try:
        yield
    except dist.DistError as error:
        raise CollectiveTimeoutError(
            f"rank {rank} could not start: the store, which rank 0 or torchrun keeps, has ended "
            f"(look at rank 0's own error): {first_line(error)}"
        ) from error


def _missing(store: dist.Store, keys: list[str], rank: int, timeout: float) -> CollectiveError:
    """Return the error that names missing ranks, by the keys that the store lacks.

    keys: one per rank.
    """
    missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
    late = ", ".join(f"rank {peer}" for peer in missing) or "another rank"
    return CollectiveTimeoutError(
        f"rank {rank} could not start: {late} did not come within {timeout:.3g} s"
    )


def _confirmations(name: str, size: int) -> list[str]:
    return [f"{name}: rank {peer}" for peer in range(size)]

"""Start real processes as ranks, bounded in time."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the text has its traceback."""


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(
    connection: Connection,
    rank: int,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: Any,
) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        connection.send((True, fn(rank, *args)))
    except BaseException:  # noqa: BLE001 - handed to the test
        connection.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    may_die: frozenset[int] = frozenset(),
) -> list[Any]:
    """Run `fn(rank, *args)` in `size` spawned processes; return the picklable results by rank.

    torchrun's variables are set, on one node. Raises RankFailed with the failed ranks' tracebacks;
    what ranks of `may_die` do is ignored. Every process has ended when this returns.
    """
    context = mp.get_context("spawn")
    port = free_port()
    processes: list[mp.process.BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(size):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, rank, environment, fn, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout
    results: list[Any] = []
    failures: list[str] = []
    try:
        for rank, pipe in enumerate(pipes):
            if rank in may_die:
                results.append(None)
                continue
            good, value = _receive(pipe, rank, deadline)
            results.append(value)
            if not good:
                failures.append(f"rank {rank} of {size}:\n{value}")
    finally:
        for rank, process in enumerate(processes):
            process.join(1.0 if failures or rank in may_die else 10.0)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise RankFailed("\n".join(failures))
    return results


def _receive(pipe: Connection, rank: int, deadline: float) -> tuple[bool, Any]:
    try:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return False, "did not end in time"
        good, value = pipe.recv()
        return bool(good), value
    except EOFError:
        return False, "died without a word"

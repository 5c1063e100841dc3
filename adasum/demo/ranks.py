"""Start ranks as forked processes of this host, which need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch


def run(size: int, job: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
    """Run `job(*args)` on ranks; return the results by rank, None for missing ones.

    Every process has ended when this returns. CUDA must not have been used before.
    """
    # The parent's threads would be missing in the forked ranks.
    torch.set_num_threads(1)
    # Otherwise each rank would import torch's compiler with its first optimizer.
    torch.optim.SGD([torch.ones(1)])
    context = multiprocessing.get_context("fork")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ranks = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, port, there, job, args))
        process.start()
        there.close()
        ranks.append((process, here))
    deadline = time.monotonic() + seconds
    try:
        return [_result(here, ranks, deadline) for _, here in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _result(here: Connection, ranks: list[Any], deadline: float) -> Any:
    # The stopped rank sends nothing. Its peers send their errors, so wait until they have ended.
    while not here.poll(0.1):
        others = [process.is_alive() for process, other in ranks if other is not here]
        if time.monotonic() > deadline or not any(others):
            return None
    with suppress(EOFError):
        return here.recv()
    return None


def _rank(
    rank: int,
    size: int,
    port: int,
    there: Connection,
    job: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    there.send(job(*args))
    there.close()

"""Start real processes as ranks, bounded in time."""

from __future__ import annotations

import io
import logging
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.processes.nursery import Rank, nursery

# Seconds for a rank's exit: after its answer, and after another's failure.
EXIT = 10.0
EXIT_AFTER_FAILURE = 1.0


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the text has its traceback."""


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int | None = None) -> set[str]:
    """The TCP addresses, as Linux writes them, at which this process listens, all or on a port."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    mine = {os.readlink(link) for link in links if link.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if os.path.exists(table) else ():
            _, local, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in mine:
                found.add(local)
    return {each for each in found if port is None or each.endswith(f":{port:04X}")}


def on_one_node(rank: int, size: int, port: int) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def main(place: list[Any]) -> None:
    """What a rank runs, in tests.processes.nursery's process: [directory, rank]."""
    import torch

    directory, rank = Path(place[0]), int(place[1])
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads((directory / "call").read_bytes())
        answer = (True, fn(rank, *args))
    except BaseException:  # noqa: BLE001 - handed to the test
        answer = (False, traceback.format_exc())
    unfinished = directory / f"unfinished{rank}"
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(directory / f"answer{rank}")
    if not answer[0]:
        raise SystemExit(1)


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    may_die: frozenset[int] = frozenset(),
) -> list[Any]:
    """Run `fn(rank, *args)` in `size` processes; return the picklable results by rank.

    torchrun's variables are set, on one node. Raises RankFailed with the failed ranks' tracebacks;
    what ranks of `may_die` do is ignored. Every process has ended when this returns.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        (directory / "call").write_bytes(pickle.dumps((fn, args)))
        ranks = [
            nursery().start(
                f"{__name__}:{main.__name__}",
                [name, rank],
                {**on_one_node(rank, size, port), "OMP_NUM_THREADS": "1"},
                directory / f"log{rank}",
                teardown=False,
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * size
        failures: list[str] = []
        try:
            for rank, process in enumerate(ranks):
                if rank in may_die:
                    continue
                good, results[rank] = _answer(process, directory / f"answer{rank}", deadline)
                if not good:
                    said = (directory / f"log{rank}").read_text(errors="replace")[-3000:]
                    failures.append(f"rank {rank} of {size}:\n{results[rank]}\n{said}")
        finally:
            for rank, process in enumerate(ranks):
                patience = EXIT_AFTER_FAILURE if failures else EXIT
                if rank in may_die or process.wait(time.monotonic() + patience) is None:
                    process.send(SIGKILL)
                    process.wait(time.monotonic() + EXIT)
    if failures:
        raise RankFailed("\n".join(failures))
    return results


def script(rank: int, path: str, *options: str) -> str:
    """For `run_ranks`: what a script prints, run as by torchrun but with torch imported already."""
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, *options]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _answer(process: Rank, path: Path, deadline: float) -> tuple[bool, Any]:
    while not path.exists():
        ended = process.status() is not None
        # It may have answered between the two looks.
        if ended and not path.exists():
            return False, "died without a word"
        if time.monotonic() > deadline:
            return False, "did not end in time"
        time.sleep(0.01)
    good, value = pickle.loads(path.read_bytes())
    return bool(good), value


class Kept(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

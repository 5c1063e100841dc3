"""Carry out one case: start its ranks, do to them what they cannot do themselves, and report."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import read as read_records
from tests.faults.cases import EXIT, GRACE, Case
from tests.processes.harness import free_port, on_one_node
from tests.processes.nursery import Nursery, Rank
from tests.processes.test_nccl import ONE_GPU

# What a rank runs.
MAIN = "tests.faults.job:main"
# Starting forked ranks, with others on the same two cores.
START = 40.0


@dataclass
class Report:
    """What came of a case: the ranks' exit statuses, their diaries by rank, and what was left.

    named: The ranks at fault by the flight records; none without records.
    """

    statuses: list[int | None]
    diaries: list[list[dict[str, Any]]]
    ended: list[float | None]
    said: list[str]
    left: list[str]
    named: list[int]

    def entries(self, rank: int, what: str) -> list[dict[str, Any]]:
        """The diary's lines of one kind."""
        return [line for line in self.diaries[rank] if line["what"] == what]

    def one(self, rank: int, what: str) -> dict[str, Any]:
        """The last line of one kind; an AssertionError with all that the rank said if none."""
        found = self.entries(rank, what)
        assert found, f"rank {rank} wrote no {what!r}: {self.diaries[rank]}\n{self.said[rank]}"
        return found[-1]

    @property
    def fault(self) -> float | None:
        """When it happened, where a rank was at fault."""
        whens = [
            line["when"] for diary in self.diaries for line in diary if line["what"] == "fault"
        ]
        return min(whens, default=None)


def environment(rank: int, size: int, port: int, directory: Path) -> dict[str, str]:
    """torchrun's variables, on one node; temporary files go where they are seen."""
    return {
        **on_one_node(rank, size, port),
        "TMPDIR": str(directory / "tmp"),
        "ADASUM_FLIGHT_FOLDER": str(directory / "flight"),
        # torch's own, which stays.
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
    }


def carry_out(case: Case, nursery: Nursery, directory: Path) -> Report:
    """Run the case to its end; every process of it has ended when this returns."""
    (directory / "tmp").mkdir()
    job = {**asdict(case), "directory": str(directory)}
    port = free_port()
    with ExitStack() as stack:
        # Where there are fewer GPUs than ranks they share them.
        extra = dict(ONE_GPU) if case.transport == "nccl" else {}
        store: Rank | None = None
        if case.where == "port taken":
            taken = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert taken.getsockname()[1] == port
        if case.store == "agent":
            extra["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            store = nursery.start(
                MAIN,
                {**job, "use": "store"},
                environment(0, case.size, port, directory),
                directory / "store.log",
            )
            stack.callback(store.send, signal.SIGKILL)
            wait_for(directory / "store")
        started = time.monotonic()
        logs = [directory / f"rank{rank}.log" for rank in range(case.size)]
        ranks = [
            nursery.start(
                MAIN, job, {**environment(rank, case.size, port, directory), **extra}, log
            )
            for rank, log in enumerate(logs)
        ]
        if store is not None:
            wait_for(directory / "kill store")
            store.send(signal.SIGKILL)
            store.wait(time.monotonic() + GRACE)
            (directory / "store is gone").touch()
        # After the start and the fault, two waits for a peer at most: the error's, and the exit's.
        _wait(case, ranks, started + START + case.late + 2 * (case.timeout + GRACE) + EXIT)
        statuses = [rank.status() for rank in ranks]
        left = _left(ranks, directory)
        for rank in ranks:
            rank.send(signal.SIGKILL)
            rank.wait(time.monotonic() + GRACE)
    left += _taken(port)
    return Report(
        statuses,
        [read(directory / f"rank{rank}.jsonl") for rank in range(case.size)],
        [rank.ended for rank in ranks],
        [log.read_text(errors="replace")[-3000:] for log in logs],
        left,
        _named(directory / "flight"),
    )


def _named(folder: Path) -> list[int]:
    records = folder.exists() and any(folder.iterdir())
    return [each.rank for each in Analysis(read_records([str(folder)])).culprits] if records else []


def _wait(case: Case, ranks: list[Rank], deadline: float) -> None:
    """Wait for the ranks' ends; then wake or kill the one that was stopped."""
    others = [rank for i, rank in enumerate(ranks) if i != case.victim]
    # All are asked each time, since that decides when each is said to have ended.
    while None in [rank.status() for rank in others] and time.monotonic() < deadline:
        time.sleep(0.02)
    if case.victim < 0:
        return
    victim = ranks[case.victim]
    if case.what == "stop":
        victim.send(signal.SIGKILL)
    elif case.what == "stop and go on":
        victim.send(signal.SIGCONT)
        deadline = time.monotonic() + 2 * (case.timeout + GRACE) + EXIT
    victim.wait(deadline)


def _left(ranks: list[Rank], directory: Path) -> list[str]:
    """What the ranks should not have left: processes and files."""
    left = []
    sessions = {rank.pid for rank in ranks}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in sessions and fields[0] != "Z":
            left.append(f"process {path.parent.name} {fields[0]}")
    left += [str(path) for path in (directory / "tmp").iterdir()]
    for place in ("/dev/shm", "/tmp"):
        for name in os.listdir(place):
            # Where programs beside the tests leave their flight records.
            ours = name.startswith("adasum-") and not name.startswith("adasum-flight-")
            if ours or any(f"_{pid}_" in name for pid in sessions):
                left.append(f"{place}/{name}")
    return left


def _taken(port: int) -> list[str]:
    with socket.socket() as probe:
        # Connections of ranks that have ended are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return [f"port {port}: {error}"]
    return []


def wait_for(path: Path) -> None:
    """Return when the file is there."""
    deadline = time.monotonic() + START
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)


def read(path: Path) -> list[dict[str, Any]]:
    """A diary; empty where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

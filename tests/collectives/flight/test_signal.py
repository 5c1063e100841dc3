"""SIGUSR1 and SIGTERM: a rank writes its file while it waits, also where the wait is in C."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import collectives
from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import read
from tests.processes.harness import run_ranks

LATE = 4.0


def wait_for_a_late_rank(rank: int, folder: str, transport: str) -> float:
    """Rank 1 is late; as soon as rank 0 waits, both get the signal. How long the files took."""
    os.environ["ADASUM_FLIGHT_FOLDER"] = folder
    group = collectives.init(transport=transport, timeout=60.0)
    group.barrier()
    took = 0.0
    if rank == 1:
        start = time.monotonic()
        Path(folder, "pid1").write_text(str(os.getpid()))
        pids = [os.getpid(), int(_await(Path(folder, "pid0")))]
        time.sleep(1.6)
        signalled = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        while (
            len(list(Path(folder).glob("flight-*.json"))) < 2
            and signalled + LATE > time.monotonic()
        ):
            time.sleep(0.01)
        took = time.monotonic() - signalled
        time.sleep(max(0.0, start + LATE - time.monotonic()))
    else:
        Path(folder, "unfinished").write_text(str(os.getpid()))
        Path(folder, "unfinished").rename(Path(folder, "pid0"))
    assert group.all_reduce(torch.ones(1), name="late").item() == 2.0
    collectives.shutdown()
    return took


def _await(path: Path) -> str:
    deadline = time.monotonic() + 30.0
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_rank_that_waits_writes_its_file_at_once_and_goes_on(
    transport: str, tmp_path: Path
) -> None:
    _, took = run_ranks(2, wait_for_a_late_rank, str(tmp_path), transport)
    assert took < LATE - 1.6
    dumps = read([str(tmp_path)])
    assert "play" not in dumps[0].stack and any("all_reduce" in line for line in dumps[0].stack)
    assert any("wait_for_a_late_rank" in line for line in dumps[1].stack)
    (culprit,) = Analysis(dumps).culprits
    assert culprit.rank == 1 and "has not made all_reduce 'late'" in culprit.why


def handlers(rank: int) -> list[Any]:
    """What handles the signal where the program handles it, and in a forked child."""
    own = []
    signal.signal(signal.SIGUSR1, lambda *_: own.append(1))
    collectives.init().barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    collectives.shutdown()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    collectives.init().barrier()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    collectives.default_group().barrier()
    return [own, os.waitstatus_to_exitcode(status)]


def test_handler_of_the_program_stays_and_a_forked_child_has_none() -> None:
    assert run_ranks(2, handlers) == [[[1], -signal.SIGUSR1]] * 2


def save_checkpoint() -> None:
    time.sleep(60.0)


def hang(rank: int, folder: str, own: bool) -> None:
    """Rank 1 hangs outside of collectives, and gets SIGTERM once rank 0 has timed out."""
    os.environ["ADASUM_FLIGHT_FOLDER"] = folder
    if own:
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, "own").touch() or os._exit(0))
    group = collectives.init(transport="gloo", timeout=3.0)
    if rank == 1:
        Path(folder, "unfinished").write_text(str(os.getpid()))
        Path(folder, "unfinished").rename(Path(folder, "pid1"))
        save_checkpoint()
    with pytest.raises(collectives.CollectiveError):
        group.all_reduce(torch.ones(1), name="loss")
    os.kill(int(_await(Path(folder, "pid1"))), signal.SIGTERM)


@pytest.mark.parametrize("own", [False, True])
def test_rank_that_hangs_outside_of_a_call_writes_its_stack_when_it_is_ended(
    own: bool, tmp_path: Path
) -> None:
    start = time.monotonic()
    run_ranks(2, hang, str(tmp_path), own, may_die=frozenset({1}))
    assert time.monotonic() - start < 50.0
    assert (tmp_path / "own").exists() is own
    dumps = read([str(tmp_path)])
    assert any("save_checkpoint" in line for line in dumps[1].stack)
    (culprit,) = Analysis(dumps).culprits
    assert culprit.rank == 1 and "has not made all_reduce 'loss'" in culprit.why

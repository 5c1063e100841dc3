"""A timeout on one rank: the others write their records too, also a rank outside of collectives."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.tools.flight import alarm
from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import read
from tests.processes.harness import Kept, run_ranks

ASLEEP, TIMEOUT = 8.0, 2.0


def save_checkpoint(seconds: float) -> None:
    time.sleep(seconds)


def alarms() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "adasum-flight"]


def sleep_in_own_code(rank: int, folder: str, own_store: bool, exits: bool) -> float:
    """Rank 1 gets no signal and ends well; the others time out meanwhile."""
    os.environ["ADASUM_FLIGHT_FOLDER"] = folder
    if not own_store:
        dist.init_process_group("gloo")
    kept = Kept()
    logging.getLogger("collectives.flight").addHandler(kept)
    group = collectives.init(timeout=TIMEOUT)
    group.all_reduce(torch.ones(1), name="warm-up")
    start = time.monotonic()
    if rank == 1:
        save_checkpoint(ASLEEP)
        (said,) = kept.said
        assert "CollectiveTimeoutError: rank" in said and "all_reduce 'loss'" in said
        return 0.0
    with pytest.raises(collectives.CollectiveTimeoutError):
        group.all_reduce(torch.ones(1), name="loss")
    took = time.monotonic() - start
    if exits:
        # Also the rank that keeps the store.
        sys.exit(0)
    return took


@pytest.mark.parametrize("own_store", [True, False])
def test_rank_that_sleeps_in_its_own_code_writes_its_stack_when_others_time_out(
    own_store: bool, tmp_path: Path
) -> None:
    times = run_ranks(3, sleep_in_own_code, str(tmp_path), own_store, False)
    assert max(times) < TIMEOUT + 5.0
    dumps = read([str(tmp_path)])
    assert sorted(dumps) == [0, 1, 2]
    assert "save_checkpoint" in dumps[1].stack[1]
    assert len([line for line in dumps[1].stack if "most recent call first" in line]) > 1
    (culprit,) = Analysis(dumps).culprits
    assert culprit.rank == 1 and "has not made all_reduce 'loss'" in culprit.why


def test_rank_writes_its_stack_if_the_rank_that_keeps_the_store_ends_at_once(
    tmp_path: Path,
) -> None:
    run_ranks(2, sleep_in_own_code, str(tmp_path), True, True, may_die=frozenset({0}))
    assert "save_checkpoint" in read([str(tmp_path)])[1].stack[1]


def start_and_close(rank: int, folder: str) -> list[int]:
    """The number of alarm threads without a folder, with one, and after shutdown."""
    counts = []
    for value in ("", folder):
        os.environ["ADASUM_FLIGHT_FOLDER"] = value
        collectives.init().barrier()
        counts.append(len(alarms()))
        collectives.shutdown()
    deadline = time.monotonic() + 10.0
    while alarms() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [*counts, len(alarms())]


def test_thread_is_there_only_with_a_folder_and_while_a_group_is_open(tmp_path: Path) -> None:
    assert run_ranks(2, start_and_close, str(tmp_path)) == [[0, 1, 0]] * 2
    assert not [*tmp_path.iterdir()]


def start_again(rank: int, folder: str) -> list[str]:
    """After a timeout, go on with a new group in the same process group."""
    os.environ["ADASUM_FLIGHT_FOLDER"] = folder
    dist.init_process_group("gloo")
    group = collectives.init(timeout=TIMEOUT)
    if rank == 0:
        with pytest.raises(collectives.CollectiveTimeoutError):
            group.barrier()
    else:
        time.sleep(TIMEOUT + 2.0)
    collectives.shutdown()
    dist.barrier()
    kept = Kept()
    logging.getLogger("collectives.flight").addHandler(kept)
    group = collectives.init()
    time.sleep(2.0)
    group.barrier()
    return kept.said


def test_new_group_in_the_same_process_group_is_not_told_of_an_earlier_timeout(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, start_again, str(tmp_path)) == [[], []]


def outlive_the_store(rank: int, folder: str) -> list[Any]:
    """Rank 1 forks, rank 0, which keeps the store, ends, and rank 1 ends later."""
    os.environ["ADASUM_FLIGHT_FOLDER"] = folder
    failed: list[str] = []
    threading.excepthook = lambda args: failed.append(repr(args.exc_value))
    group = collectives.init()
    child = os.fork()
    if not child:
        alarm.finish("a child, which has no thread")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    group.barrier()
    if rank == 0:
        sys.exit(0)
    time.sleep(3.0)
    return [os.waitstatus_to_exitcode(status), alarms(), failed]


def test_forked_child_has_no_thread_and_the_end_of_the_store_is_no_error(tmp_path: Path) -> None:
    _, found = run_ranks(2, outlive_the_store, str(tmp_path), may_die=frozenset({0}))
    assert found == [0, [], []]
    assert not [*tmp_path.iterdir()]

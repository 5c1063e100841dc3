"""Random faults in nested groups: the files name the rank at fault, and no other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.tools.flight.analysis import Analysis, report
from collectives.tools.flight.reader import read
from tests.collectives.flight.scenarios import (
    FAULTS,
    IN_THREADS,
    Scenario,
    by_processes,
    by_threads,
    draw,
    named,
)

# Of the quick ones, and of those whose processes share two cores with others.
SHORT, LONG = 0.5, 5.0
THREADS, PROCESSES = 25, 25
AT_ONCE = 3


def check(scenario: Scenario, folder: Path) -> str:
    """What was said wrongly; "" if nothing."""
    if named(folder) == [scenario.victim]:
        return ""
    dumps = read([str(folder)])
    return "\n".join([f"{scenario} {scenario!r}:", *report(Analysis(dumps), dumps)])


def test_fault_of_a_thread_is_named(tmp_path: Path, flight_folder: Callable[[Path], None]) -> None:
    wrong = []
    for seed, fault in enumerate(IN_THREADS):
        folder = tmp_path / str(seed)
        flight_folder(folder)
        scenario = draw(seed, (fault,), SHORT, most=4)
        by_threads(scenario)
        wrong.append(check(scenario, folder))
    assert not any(wrong), "\n".join(wrong)


def in_processes(seeds: range, faults: tuple[str, ...], timeout: float, folder: Path) -> list[str]:
    """What was said wrongly of the seeds' scenarios, several at once."""

    def carry_out(seed: int) -> str:
        scenario = draw(seed, faults, timeout)
        mine = folder / f"p{seed}"
        by_processes(scenario, mine, ("auto", "gloo")[seed % 2])
        return check(scenario, mine)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [each for each in pool.map(carry_out, seeds) if each]


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_process_that_is_lost_is_named(fault: str, tmp_path: Path) -> None:
    seed = {"kill": 3, "stop": 7}[fault]
    assert not in_processes(range(seed, seed + 1), (fault,), 3.0, tmp_path)


@pytest.mark.slow
def test_fifty_random_faults_are_named(
    tmp_path: Path, flight_folder: Callable[[Path], None]
) -> None:
    wrong = in_processes(range(1000, 1000 + PROCESSES), FAULTS, LONG, tmp_path)
    for seed in range(2000, 2000 + THREADS):
        folder = tmp_path / f"t{seed}"
        flight_folder(folder)
        scenario = draw(seed, IN_THREADS, 2 * SHORT)
        by_threads(scenario)
        wrong += [said] if (said := check(scenario, folder)) else []
    assert not wrong, "\n".join(wrong)

"""Random faults in nested groups: the files name the rank at fault, and no other.

Those of processes, which may be killed or stopped, are in tests/faults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.tools.flight.analysis import Analysis, report
from collectives.tools.flight.reader import read
from tests.collectives.flight.scenarios import IN_THREADS, Scenario, by_threads, draw, named

SHORT, THREADS = 0.5, 50


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


@pytest.mark.slow
def test_fifty_random_faults_are_named(
    tmp_path: Path, flight_folder: Callable[[Path], None]
) -> None:
    wrong = []
    for seed in range(2000, 2000 + THREADS):
        folder = tmp_path / f"t{seed}"
        flight_folder(folder)
        scenario = draw(seed, IN_THREADS, 2 * SHORT)
        by_threads(scenario)
        wrong += [said] if (said := check(scenario, folder)) else []
    assert not wrong, "\n".join(wrong)

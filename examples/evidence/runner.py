"""Running cells that have no result yet, with a progress bar, a time limit and a budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from evidence import bill, store
from evidence.cells import Cell, train

# Roughly a training's CPU seconds, for the progress bar's estimate alone.
SECONDS = {"digits": 2, "fashion": 14, "text": 20, "finetune": 22}


class Stop(Exception):
    """The time, or the budget, of this call is used up."""


class Runner:
    """Runs cells that have no result yet, as many at a time as there are workers.

    Args:
        folder: Of the results.
        workers: Processes of one thread each; with one, cells run in this process.
        minutes: After so long no cell is begun.
        total: Cells' seconds in all, for the bar.
    """

    def __init__(self, folder: Path, workers: int, minutes: float, total: float) -> None:
        self._folder, self._workers = folder, workers
        self._ends = time.monotonic() + 60 * minutes
        self._spent = sum(seconds_of(folder))
        self._bar = tqdm(total=total, unit="core-s", smoothing=0.05, mininterval=5.0)
        self._pool: ProcessPoolExecutor | None = None
        self._counted: set[str] = set()

    def __enter__(self) -> Runner:
        if self._workers > 1:
            self._pool = ProcessPoolExecutor(
                self._workers, get_context("spawn"), torch.set_num_threads, initargs=(1,)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            # What runs is finished and saved; what waits is not begun.
            self._pool.shutdown(cancel_futures=True)
        self._bar.close()

    def run(self, title: str, cells: Sequence[Cell]) -> None:
        """Return when all of the cells have results.

        Raises:
            Stop: There is no time, or no budget, to begin the next one.
        """
        self._bar.set_description(title)
        running: dict[Future[float], Cell] = {}
        for cell in dict.fromkeys(cells):
            if store.path_of(cell, self._folder).exists():
                self._count(cell)
                continue
            self._may_begin()
            if self._pool is None:
                self._done(cell, run_one(cell, self._folder))
                continue
            running[self._pool.submit(run_one, cell, self._folder)] = cell
            if len(running) == self._workers:
                self._collect(running)
        while running:
            self._collect(running)

    def _collect(self, running: dict[Future[float], Cell]) -> None:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            self._done(running.pop(future), future.result())

    def _done(self, cell: Cell, seconds: float) -> None:
        self._spent += seconds
        self._count(cell)

    def _count(self, cell: Cell) -> None:
        if cell.name not in self._counted:
            self._counted.add(cell.name)
            self._bar.update(SECONDS[cell.task])

    def _may_begin(self) -> None:
        if time.monotonic() > self._ends:
            raise Stop("the minutes of this call are over; call it again to go on")
        if self._spent > 3600 * bill.MOST_HOURS:
            raise Stop(f"the budget of {bill.MOST_HOURS:g} core-hours is spent")


def run_one(cell: Cell, folder: Path) -> float:
    """Train the cell, save its result, and return the CPU seconds it took."""
    result = train(cell)
    store.save(cell, result, folder)
    return float(result["seconds"])


def seconds_of(folder: Path) -> Iterator[float]:
    for path in folder.glob("*/*.json"):
        yield float(store.read(path)["seconds"])

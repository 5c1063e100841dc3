"""Running cells that have no result yet, with a progress bar, a time limit and a budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

from evidence import bill
from evidence.cells import Cell, train
from evidence.store import Store

# Roughly a training's CPU seconds, for the progress bar's estimate alone.
SECONDS = {"digits": 2, "fashion": 14, "text": 20, "finetune": 22}


class Stop(Exception):
    """The time, or the budget, of this call is used up."""


class Runner:
    """Runs cells that have no result yet, as many at a time as there are workers.

    Args:
        store: The results there are, and where new ones go.
        workers: Processes of one thread each; with one, cells run in this process.
        minutes: After so long no cell is begun.
        total: Cells' seconds in all, for the bar.
    """

    def __init__(self, store: Store, workers: int, minutes: float, total: float) -> None:
        self._store, self._workers = store, workers
        self._ends = time.monotonic() + 60 * minutes
        self._spent = store.seconds()
        self._bar = tqdm(total=total, unit="core-s", smoothing=0.05, mininterval=5.0)
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[Future[dict[str, Any]], Cell] = {}
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
            for future, cell in self._running.items():
                if not future.cancelled() and future.exception() is None:
                    self._done(cell, future.result())
        self._bar.close()

    def run(self, title: str, cells: Sequence[Cell]) -> None:
        """Return when all of the cells have results.

        Raises:
            Stop: There is no time, or no budget, to begin the next one.
        """
        self._bar.set_description(title)
        for cell in dict.fromkeys(cells):
            if self._store.named(cell.name) is not None:
                self._count(cell)
                continue
            self._may_begin()
            if self._pool is None:
                self._done(cell, train(cell))
                continue
            self._running[self._pool.submit(train, cell)] = cell
            if len(self._running) == self._workers:
                self._collect()
        while self._running:
            self._collect()

    def _collect(self) -> None:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            self._done(self._running.pop(future), future.result())

    def _done(self, cell: Cell, result: dict[str, Any]) -> None:
        self._store.save(cell, result)
        self._spent += float(result["seconds"])
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

"""Signals at random moments of collectives and training steps, whose handler raises.

As Ctrl-C in a notebook that goes on, or the SIGTERM of a preemption whose handler raises. The group
works afterwards or is unusable on all ranks; nobody waits for longer than its timeout.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

import adasum as hvd
import collectives
import collectives.initialize
from adasum.optimizer.errors import OptimizerOrderError
from collectives import CollectiveError, Group, TransportError
from tests.processes.harness import run_ranks

TIMEOUT = 10.0
# Beyond a wait for a peer: ranks share two cores with other tests.
GRACE = 10.0
# Of a whole test, before pytest's own limit; a little earlier ranks say where they hang.
LONGEST = 150.0
NUMEL = 5000
# From the first signal on there may be some more, each so many seconds later at the most.
MOST, APART = 3, 300e-6


class Interrupt(KeyboardInterrupt):
    """What the handler raises."""


class Storm:
    """Signals that begin at a random moment."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._left = 0
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_: object) -> None:
        if not self._left:
            return
        self._left -= 1
        # Not by the timer's own interval: a short one keeps the process in this handler.
        if self._left:
            signal.setitimer(signal.ITIMER_REAL, self._generator.uniform(1e-6, APART))
        raise Interrupt

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Signals begin within so many seconds of the block, if it takes as long."""
        try:
            self._left = self._generator.randint(1, MOST)
            signal.setitimer(signal.ITIMER_REAL, self._generator.uniform(1e-6, seconds))
            yield
        finally:
            self._left = 0
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def call(group: Group) -> Callable[[int], None]:
    """All-reduces in this thread."""
    return lambda step: group.all_reduce(torch.ones(NUMEL), name=f"call {step}")


def queue(group: Group) -> Callable[[int], None]:
    """All-reduces by the communication thread."""

    def run(step: int) -> None:
        works = [
            group.all_reduce(torch.ones(NUMEL), name=f"{step}.{i}", async_op=True) for i in range(3)
        ]
        for work in works:
            work.wait()

    return run


def request(group: Group) -> Callable[[int], None]:
    """A request that is started and waited for."""
    made = group.all_reduce_init(torch.ones(NUMEL), name="request")

    def run(step: int) -> None:
        made.start()
        made.wait()

    return run


def train(group: Group) -> Callable[[int], None]:
    """A step of DistributedOptimizer, by both methods in turn."""
    collectives.initialize._thread.group = group
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1), named_parameters=part.named_parameters(),
            op=op,
        )
        for part, op in zip(model, (hvd.Average, hvd.Adasum), strict=True)
    ]  # fmt: skip

    def run(step: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return run


USES = (call, queue, request, train)


def survive(rank: int, trials: int, size: int) -> list[str]:
    """What became of the group in each trial: "answered" or "refused"."""
    faulthandler.dump_traceback_later(LONGEST - 10.0)
    whole = collectives.init(timeout=TIMEOUT)
    storm = Storm(random.Random(rank))
    outcomes = []
    for trial in range(trials):
        part = whole.split(range(size))
        assert part is not None
        make = USES[trial % len(USES)]
        begin = time.monotonic()
        use = None
        try:
            # A rank may still be in here while the storm already makes the other one abort.
            use = make(part)
            if trial // len(USES) % size == rank:
                with storm.within(4e-3):
                    for step in range(5):
                        use(step)
            else:
                for step in range(5):
                    use(step)
        except (Interrupt, CollectiveError, OptimizerOrderError):
            # Of one rank there is no other whose storm could have come so early.
            if use is None and size == 1:
                raise
        except RuntimeError as error:
            # What CPython's threading says where starting a thread is interrupted, and ours where
            # start() or wait() of a request came through although the caller did not get to know.
            if "lock" not in str(error) and "was started already" not in str(error):
                raise
        # no_grad() of torch's own, which an interrupt leaves on.
        torch.set_grad_enabled(True)
        collectives.initialize._thread.group = None
        outcomes.append(last(part, size))
        with suppress(TransportError):
            # Where the storm has left calls that can never be done: it counts them.
            part.close()
        assert time.monotonic() - begin < TIMEOUT + GRACE, (trial, make)
        whole.barrier()
    collectives.shutdown()
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def last(part: Group, size: int) -> str:
    """A call after the storm."""
    tensor = torch.full((NUMEL,), part.rank + 1.0)
    try:
        part.all_reduce(tensor, name="last")
    except CollectiveError:
        return "refused"
    assert tensor.tolist() == [size * (size + 1) / 2] * NUMEL
    return "answered"


@pytest.mark.parametrize("trials", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2])
def test_storm_of_signals_leaves_a_group_that_works_or_refuses(size: int, trials: int) -> None:
    answers = run_ranks(size, survive, trials, size, timeout=LONGEST)
    assert all(each == answers[0] for each in answers)
    if size == 1:
        assert {*answers[0]} == {"answered"}

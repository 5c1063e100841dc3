"""Launches that run together, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.ptx_emulator.memory import GlobalMemory, Traffic
from tests.ptx_emulator.parse import Program
from tests.ptx_emulator.races import Clocks


class Started(NamedTuple):
    """One of the launches that run together.

    Attributes:
        program: The kernel.
        grid: How many blocks, all of which are resident.
        arguments: One for each parameter, pointers as addresses.
        shared: Bytes of shared memory of each block.
        rank: Whose it is. A rank's launches follow each other, as on a stream.
        node: Of which node that rank is. Nodes share nothing, and none waits for another.
        delay: Nanoseconds after which it may begin.
        traffic: Filled, where given.
    """

    program: Program
    grid: int
    arguments: Sequence[int]
    shared: int
    rank: int = 0
    node: int = 0
    delay: int = 0
    traffic: Traffic | None = None


class Machine:
    """What all launches share that run together.

    Attributes:
        clocks: Where given, races are looked for.
        now: Nanoseconds, of which a basic block takes one.
    """

    def __init__(self, random: np.random.Generator, clocks: Clocks | None) -> None:
        self.random, self.clocks, self.now = random, clocks, 0
        self.memory = GlobalMemory(clocks)


class Launch:
    """What all threads of a launch share.

    Attributes:
        machine: What it shares with those beside it.
        dependent: Whether the launch ahead on the stream may not have ended.
        first: The number of its first block among all launches'.
    """

    def __init__(self, machine: Machine, started: Started, dependent: bool, first: int) -> None:
        self.program, self.grid, self.shared_size = started.program, started.grid, started.shared
        named = zip(started.program.parameters, started.arguments, strict=True)
        self.arguments = dict(named)
        self.dependent, self.first, self.traffic = dependent, first, started.traffic
        self.machine, self.random, self.clocks = machine, machine.random, machine.clocks
        self.memory = machine.memory
        self.rank, self.node, self.delay = started.rank, started.node, started.delay
        self.blocks = np.arange(first, first + started.grid)


def set_up(
    started: Sequence[Started], seed: int, races: bool, dependent: bool
) -> tuple[Machine, list[Launch]]:
    """Return what launches share, and what the threads of each do.

    Raises:
        ValueError: A launch has not as many arguments as its kernel has parameters, or the blocks
            of two are not as large.
    """
    for one in started:
        if len(one.arguments) != len(one.program.parameters):
            raise ValueError(f"{one.program.name} takes {len(one.program.parameters)} arguments")
    widths = {one.program.threads for one in started}
    if len(widths) != 1:
        raise ValueError(f"ranks have blocks of as many threads each, not of {sorted(widths)}")
    grids = [one.grid for one in started]
    ranks, nodes = [one.rank for one in started], [one.node for one in started]
    clocks = Clocks(grids, widths.pop(), ranks, nodes) if races else None
    machine = Machine(np.random.default_rng(seed), clocks)
    first = np.cumsum(grids) - grids
    return machine, [
        Launch(machine, one, dependent, int(k)) for one, k in zip(started, first, strict=True)
    ]

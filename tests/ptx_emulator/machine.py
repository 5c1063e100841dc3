"""Which threads run next: lockstep where they agree, else in a random order.

Each thread has its own place in the program. Of a block's threads those furthest behind go first,
which brings them together again where paths join; of the resident blocks, some that stand at one
place, chosen at random, go together to the next place where threads wait or branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.memory import Traffic
from tests.ptx_emulator.parse import Immediate, Instruction, Name, Program
from tests.ptx_emulator.races import Clocks
from tests.ptx_emulator.threads import Launch, Threads

_LEFT = np.iinfo(np.int64).max
# Runs of instructions, for each resident block, after which a launch counts as hung.
_PATIENCE = 20_000


class HangError(RuntimeError):
    """Threads that wait for what never comes."""


def launch(
    program: Program,
    grid: int,
    arguments: Sequence[int],
    shared: int,
    *,
    resident: int,
    seed: int = 0,
    races: bool = True,
    traffic: Traffic | None = None,
) -> None:
    """Run every block of `grid` to its end.

    arguments: one a parameter, pointers as addresses. shared: bytes a block. resident: blocks that
    run at once; the others follow, in a random order. seed: of all that is random. races: whether
    they are looked for. traffic: filled, where given. Raises AccessError, RaceError or HangError.
    """
    if len(arguments) != len(program.parameters):
        raise ValueError(f"{program.name} takes {len(program.parameters)} arguments")
    random = np.random.default_rng(seed)
    named = dict(zip(program.parameters, arguments, strict=True))
    clocks = Clocks(grid, program.threads) if races else None
    common = Launch(program, grid, named, shared, random, clocks, traffic)
    order = random.permutation(grid)
    with np.errstate(all="ignore"):
        for first in range(0, grid, resident):
            _Residents(common, order[first : first + resident]).finish()


class _Residents:
    """The blocks that run at once."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self._launch, self._blocks = launch, blocks
        self._threads = Threads(launch, blocks)
        # Of each thread, the run of instructions it comes to next, and whether it waits there for
        # the others of its block.
        self._at = np.zeros((len(blocks), launch.program.threads), np.int64)
        self._waits = np.zeros(self._at.shape, bool)

    def finish(self) -> None:
        """Run them to their end."""
        random, clocks = self._launch.random, self._launch.clocks
        steps = _PATIENCE * len(self._blocks)
        for _ in range(steps):
            self._meet()
            behind = np.where(self._waits, _LEFT, self._at).min(axis=1)
            places = np.unique(behind[behind != _LEFT])
            if len(places) == 0:
                if self._waits.any():
                    raise self._hang("threads wait at a barrier for others that have left")
                return
            place = int(random.choice(places))
            candidates = np.flatnonzero(behind == place)
            chosen = candidates[random.random(len(candidates)) < random.choice([0.5, 1.0])]
            active = np.zeros(self._at.shape, bool)
            active[chosen] = (self._at[chosen] == place) & ~self._waits[chosen]
            if clocks:
                clocks.time += 1
            if len(chosen):
                self._run(place, np.flatnonzero(active))
        raise self._hang(f"no end after {steps} runs of instructions")

    def _hang(self, what: str) -> HangError:
        here = sorted({int(place) for place in np.unique(self._at) if place != _LEFT})
        first = self._launch.program.blocks[here[0]]
        text = first[0].text if first else "the end of the program"
        return HangError(f"{self._launch.program.name}: {what}, the furthest behind before {text}")

    def _meet(self) -> None:
        """Let all threads of a block pass the barrier that all of them have come to."""
        for slot in np.flatnonzero(self._waits.all(axis=1)):
            if (self._at[slot] != self._at[slot][0]).any():
                raise self._hang("the threads of a block wait at different barriers")
            self._waits[slot] = False
            if self._launch.clocks:
                self._launch.clocks.barrier(int(self._blocks[slot]))

    def _run(self, place: int, threads: Array) -> None:
        """Take `threads` through one run of instructions."""
        at, waits = self._at.reshape(-1), self._waits.reshape(-1)
        everyone = len(threads) == len(at)
        index: Array | None = None if everyone else threads
        at[threads] = place + 1
        for instruction in self._launch.program.blocks[place]:
            name, taken = instruction.parts[0], threads
            if instruction.guard is not None:
                taken = threads[self._threads.holds(*instruction.guard, index)]
            if name == "bra":
                at[taken] = self._label(instruction)
            elif name == "ret":
                at[taken] = _LEFT
            elif name == "bar":
                if instruction.parts != ("bar", "sync") or instruction.operands != (Immediate(0),):
                    raise NotImplementedError(instruction.text)
                waits[taken] = True
            elif len(taken):
                whole = everyone and len(taken) == len(threads)
                self._threads.execute(instruction, None if whole else taken)

    def _label(self, instruction: Instruction) -> int:
        (target,) = instruction.operands
        assert isinstance(target, Name)
        return self._launch.program.labels[target.text]

"""Which threads run next: those at one basic block in lockstep, basic blocks in a random order.

Each thread has its own position in the program. Of a block's threads those furthest behind go
first, so that they come together again where their paths join. Of the resident blocks that are
furthest behind at one basic block, chosen at random, some go through it together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.memory import Traffic
from tests.ptx_emulator.parse import Immediate, Instruction, Name, Program
from tests.ptx_emulator.races import Clocks
from tests.ptx_emulator.threads import WARP, Launch, Threads

_EXITED = np.iinfo(np.int64).max
# Basic blocks run, for each resident block, after which a launch counts as hung.
_MAX_STEPS = 20_000


class HangError(RuntimeError):
    """Threads wait for something that will not happen."""


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
    dependent: bool = False,
) -> None:
    """Run every block of `grid` to its end.

    Args:
        program: The kernel.
        grid: How many blocks.
        arguments: One for each parameter, pointers as addresses.
        shared: Bytes of shared memory of each block.
        resident: Blocks that run at once; the others follow, in a random order.
        seed: Of everything that is random.
        races: Whether to look for data races.
        traffic: Filled, where given.
        dependent: Whether the launch ahead on the stream may not have ended, so that each thread
            must wait for it before it accesses global memory or exits.

    Raises:
        NotImplementedError: The program has an instruction that is not listed; nothing has run.
        AccessError: An access is out of bounds or misaligned, or two values go to one address, or
            a thread does not wait for the launch ahead.
        RaceError: Nothing orders two accesses to one address.
        HangError: The blocks do not finish.
    """
    if len(arguments) != len(program.parameters):
        raise ValueError(f"{program.name} takes {len(program.parameters)} arguments")
    random = np.random.default_rng(seed)
    named = dict(zip(program.parameters, arguments, strict=True))
    clocks = Clocks(grid, program.threads) if races else None
    common = Launch(program, grid, named, shared, random, clocks, traffic, dependent)
    order = random.permutation(grid)
    with np.errstate(all="ignore"):
        for first in range(0, grid, resident):
            _Residents(common, order[first : first + resident]).finish()


class _Residents:
    """The blocks that run at once."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self._launch, self._blocks = launch, blocks
        self._threads = Threads(launch, blocks)
        # Of each thread, the basic block it comes to next, and whether it waits there for the
        # others of its block.
        self._at = np.zeros((len(blocks), launch.program.threads), np.int64)
        self._waits = np.zeros(self._at.shape, bool)

    def finish(self) -> None:
        """Run them to their end."""
        random, clocks = self._launch.random, self._launch.clocks
        steps = _MAX_STEPS * len(self._blocks)
        for _ in range(steps):
            self._pass_barriers()
            behind = np.where(self._waits, _EXITED, self._at).min(axis=1)
            positions = np.unique(behind[behind != _EXITED])
            if len(positions) == 0:
                if self._waits.any():
                    raise self._hang("threads wait at a barrier for others that have exited")
                return
            position = int(positions[random.integers(len(positions))])
            candidates = np.flatnonzero(behind == position)
            chosen = candidates[random.random(len(candidates)) < (0.5, 1.0)[random.integers(2)]]
            if len(chosen) == 0:
                continue
            active = np.zeros(self._at.shape, bool)
            active[chosen] = (self._at[chosen] == position) & ~self._waits[chosen]
            if clocks:
                clocks.time += 1
            self._run(position, np.flatnonzero(active))
        raise self._hang(f"no end after {steps} basic blocks")

    def _hang(self, what: str) -> HangError:
        first = self._launch.program.basic_blocks[int(self._at.min())]
        text = first[0].text if first else "the end of the program"
        return HangError(f"{self._launch.program.name}: {what}, the furthest behind before {text}")

    def _pass_barriers(self) -> None:
        """Let the threads of each block pass a barrier that all of them have reached."""
        if not self._waits.any():
            return
        for slot in np.flatnonzero(self._waits.all(axis=1)):
            if (self._at[slot] != self._at[slot][0]).any():
                raise self._hang("the threads of a block wait at different barriers")
            self._waits[slot] = False
            if self._launch.clocks:
                self._launch.clocks.barrier(int(self._blocks[slot]))

    def _run(self, position: int, threads: Array) -> None:
        """Take `threads` through one basic block."""
        at, waits = self._at.reshape(-1), self._waits.reshape(-1)
        everyone = len(threads) == len(at)
        index: Array | None = None if everyone else threads
        at[threads] = position + 1
        for listed in self._launch.basic_blocks[position]:
            instruction, taken = listed[0], threads
            opcode = instruction.opcode
            if instruction.guard is not None:
                taken = threads[self._threads.holds(*instruction.guard, index)]
            if opcode in ("bra", "bra.uni"):
                at[taken] = self._label(instruction)
            elif opcode == "ret":
                self._threads.require_wait(instruction, taken)
                at[taken] = _EXITED
            elif opcode == "bar.sync":
                if instruction.operands != (Immediate(0),):
                    raise NotImplementedError(f"{instruction.text}: only barrier 0 is known")
                waits[taken] = True
            elif opcode == "bar.warp.sync":
                if instruction.operands != (Immediate(-1),) or self._launch.program.threads != WARP:
                    raise NotImplementedError(
                        f"{instruction.text}: only a block of one warp is known"
                    )
                waits[taken] = True
            elif len(taken):
                whole = everyone and len(taken) == len(threads)
                self._threads.execute(listed, None if whole else taken)

    def _label(self, instruction: Instruction) -> int:
        (target,) = instruction.operands
        assert isinstance(target, Name)
        return self._launch.program.labels[target.text]

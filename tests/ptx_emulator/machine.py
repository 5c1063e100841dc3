"""Which threads run next: those at one basic block in lockstep, basic blocks in a random order.

Each thread has its own position in the program. Of a block's threads those furthest behind go
first, so that they come together again where their paths join. Of the resident blocks that are
furthest behind at one basic block, chosen at random, some go through it together. Launches of
several ranks run at once by `launch_together`, a basic block of one or another at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.launches import Launch, Machine, Started, set_up
from tests.ptx_emulator.memory import Traffic
from tests.ptx_emulator.parse import Immediate, Instruction, Name, Program
from tests.ptx_emulator.threads import WARP, Threads, listed

_EXITED = np.iinfo(np.int64).max
# Basic blocks run, for each resident block, after which a launch counts as hung.
_MAX_STEPS = 20_000
# Basic blocks for which ranks keep their pace.
_SAME_PACE = 64
# How often a block of theirs stands still that would only find what it found before.
_PATIENCE = 0.97


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
    started = Started(program, grid, arguments, shared, traffic=traffic)
    machine, (common,) = set_up([started], seed, races, dependent)
    order = machine.random.permutation(grid)
    with np.errstate(all="ignore"):
        for first in range(0, grid, resident):
            _run_together(machine, [_Residents(common, order[first : first + resident])])


def launch_together(started: Sequence[Started], *, seed: int = 0, races: bool = True) -> None:
    """Run launches of several ranks at once, each on a GPU of its own, to their ends.

    Which rank goes on is drawn anew at each basic block, so that their programs are interleaved;
    how often each is drawn changes, so that now one and now another stands nearly still.

    Args:
        started: Their launches, of equally many threads a block; those of a rank in order.
        seed: Of everything that is random.
        races: Whether to look for data races, those between ranks among them.

    Raises:
        NotImplementedError, AccessError, RaceError, HangError: As `launch` does.
    """
    machine, launches = set_up(started, seed, races, dependent=False)
    streams: dict[int, list[Launch]] = {}
    for one in launches:
        streams.setdefault(one.rank, []).append(one)
    with np.errstate(all="ignore"):
        _run_together(machine, [_Stream(some) for some in streams.values()])


def _run_together(machine: Machine, running: Sequence[_Residents | _Stream]) -> None:
    """Run the blocks of all ranks to their ends, a rank's basic block at a time."""
    random = machine.random
    left = list(running)
    steps = _MAX_STEPS * sum(one.count for one in running)
    last = machine.now + steps + sum(one.delay for one in running)
    pace = np.ones(len(left))
    while machine.now < last:
        machine.now += 1
        if len(left) > 1 and machine.now % _SAME_PACE == 1:
            pace = random.exponential(size=len(left)) ** 3 + 1e-2
        chosen = 0
        if len(left) > 1:
            share = np.cumsum(pace[: len(left)])
            chosen = int(np.searchsorted(share, random.random() * share[-1], side="right"))
        if not left[chosen].step():
            left.pop(chosen)
            if not left:
                return
    stand = "; ".join(one.where() for one in left)
    raise HangError(f"{running[0].name}: no end after {steps} basic blocks: {stand}")


class _Stream:
    """The launches of one rank, of which each begins when the one before has ended."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches, self.name = list(launches), launches[0].program.name
        self._machine, self._clocks = launches[0].machine, launches[0].clocks
        self.count = sum(one.grid for one in launches)
        self.delay = sum(one.delay for one in launches)
        self._begin()

    def _begin(self) -> None:
        launch = self._launches[0]
        order = self._machine.random.permutation(launch.grid)
        self._running = _Residents(launch, order, f"rank {launch.rank}, ")
        self._from = self._machine.now + launch.delay

    def step(self) -> bool:
        """Take the launch that runs one step on; return whether any has not ended."""
        if self._machine.now < self._from or self._running.step():
            return True
        ended = self._launches.pop(0)
        if self._launches:
            if self._clocks:
                self._clocks.follow(ended.blocks, self._launches[0].blocks)
            self._begin()
        return len(self._launches) > 0

    def where(self) -> str:
        """Return where the launch stands that runs, in words."""
        return self._running.where()


class _Residents:
    """The blocks of one launch that run at once.

    rank: how messages begin that say where they stand.
    """

    def __init__(self, launch: Launch, blocks: Array, rank: str = "") -> None:
        self._launch, self._blocks, self._rank = launch, blocks, rank
        self.count, self.delay, self.name = len(blocks), 0, launch.program.name
        self._basic_blocks = listed(launch.program)
        self._threads = Threads(launch, blocks)
        # Of each thread, the basic block it comes to next, and whether it waits there for the
        # others of its block.
        self._at = np.zeros((len(blocks), launch.program.threads), np.int64)
        self._waits = np.zeros(self._at.shape, bool)

    def step(self) -> bool:
        """Take some of them through one basic block; return whether any has not ended."""
        random, clocks = self._launch.random, self._launch.clocks
        self._pass_barriers()
        behind = np.where(self._waits, _EXITED, self._at).min(axis=1)
        positions = np.unique(behind[behind != _EXITED])
        if len(positions) == 0:
            if self._waits.any():
                raise self._hang("threads wait at a barrier for others that have exited")
            return False
        position = int(positions[random.integers(len(positions))])
        candidates = np.flatnonzero(behind == position)
        chosen = candidates[random.random(len(candidates)) < (0.5, 1.0)[random.integers(2)]]
        if self._rank and random.random() < _PATIENCE:
            chosen = np.array([x for x in chosen if not self._threads.idles(int(x))], np.int64)
        if len(chosen) == 0:
            return True
        active = np.zeros(self._at.shape, bool)
        active[chosen] = (self._at[chosen] == position) & ~self._waits[chosen]
        if clocks:
            clocks.time += 1
        self._run(position, np.flatnonzero(active))
        return True

    def where(self) -> str:
        """Return where its blocks stand that have not ended, in words."""
        stand: dict[str, list[int]] = {}
        for slot in np.argsort(self._blocks):
            at = int(self._at[slot].min())
            if at != _EXITED:
                first = self._launch.program.basic_blocks[at]
                text = first[0].text if first else "the end of the program"
                stand.setdefault(text, []).append(int(self._blocks[slot]))
        return ", ".join(
            f"{self._rank}programs {' '.join(map(str, those))} before {text}"
            for text, those in stand.items()
        )

    def _hang(self, what: str) -> HangError:
        return HangError(f"{self.name}: {what}: {self.where()}")

    def _pass_barriers(self) -> None:
        """Let the threads of each block pass a barrier that all of them have reached."""
        if not self._waits.any():
            return
        for slot in np.flatnonzero(self._waits.all(axis=1)):
            if (self._at[slot] != self._at[slot][0]).any():
                raise self._hang("the threads of a block wait at different barriers")
            self._waits[slot] = False
            if self._launch.clocks:
                self._launch.clocks.barrier(self._launch.first + int(self._blocks[slot]))

    def _run(self, position: int, threads: Array) -> None:
        """Take `threads` through one basic block."""
        at, waits = self._at.reshape(-1), self._waits.reshape(-1)
        everyone = len(threads) == len(at)
        index: Array | None = None if everyone else threads
        at[threads] = position + 1
        for found in self._basic_blocks[position]:
            instruction, taken = found[0], threads
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
                self._threads.execute(found, None if whole else taken)

    def _label(self, instruction: Instruction) -> int:
        (target,) = instruction.operands
        assert isinstance(target, Name)
        return self._launch.program.labels[target.text]

"""Which threads run next: those at one basic block in lockstep, basic blocks in a random order.

Each thread has its own position in the program. Of a block's threads those furthest behind go
first, so that they come together again where their paths join. Of the resident blocks that are
furthest behind at one basic block, chosen at random, some go through it together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.launches import Launch, Started, set_up
from tests.ptx_emulator.memory import Traffic
from tests.ptx_emulator.parse import Immediate, Instruction, Name, Program
from tests.ptx_emulator.threads import WARP, Threads, is_seen, listed

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
    started = Started(program, grid, arguments, shared, traffic=traffic)
    machine, (common,) = set_up([started], seed, races, dependent)
    order = machine.random.permutation(grid)
    with np.errstate(all="ignore"):
        for first in range(0, grid, resident):
            Residents([common], [order[first : first + resident]]).finish()


class Residents:
    """The blocks of launches of one program that run at once.

    Args:
        launches: The launches.
        blocks: Of each the blocks, by their numbers in it.
        asleep: Whether each launch begins when it is woken.
    """

    def __init__(
        self, launches: Sequence[Launch], blocks: Sequence[Array], asleep: bool = False
    ) -> None:
        self.launches, self._launch = launches, launches[0]
        self.name = self._launch.program.name
        self._basic_blocks = listed(self._launch.program)
        self._threads = Threads(launches, blocks)
        self._owner = np.repeat(np.arange(len(launches)), [len(some) for some in blocks])
        self.rank, self.node = (
            np.array(of)[self._owner]
            for of in zip(*((one.rank, one.node) for one in launches), strict=True)
        )
        self._blocks = np.concatenate(blocks)
        # Among all launches' blocks.
        self._numbers = self._blocks + np.array([one.first for one in launches])[self._owner]
        # Of each thread, the basic block it comes to next, and whether it waits there for the
        # others of its block.
        self._at = np.zeros((len(self._owner), self._launch.program.threads), np.int64)
        self._waits = np.zeros(self._at.shape, bool)
        self._asleep, self._patient = np.full(len(self._owner), asleep), asleep
        # Of each block, where those of its threads are that are furthest behind.
        self.behind = np.full(len(self._owner), _EXITED if asleep else 0)
        self._left = np.ones(len(launches), bool)
        self.seen = np.array([any(map(is_seen, some)) for some in self._basic_blocks])

    @property
    def awake(self) -> bool:
        """Whether any block runs."""
        return not self._asleep.all()

    def wake(self, launch: Launch) -> None:
        """Let a launch begin."""
        mine = self._owner == self.launches.index(launch)
        self._asleep[mine], self.behind[mine] = False, 0

    def unseen(self) -> Array:
        """Return some blocks, all furthest behind where they do nothing that orders others."""
        going = np.flatnonzero(self.behind != _EXITED)
        if len(going) == 0 and self._waits.any():
            raise self._hang("threads wait at a barrier for others that have exited")
        going = going[~self.seen[self.behind[going]]]
        # The furthest behind, which others may be waiting for further on.
        some: Array = going[self.behind[going] == self.behind[going].min(initial=_EXITED)]
        return some

    def going(self, patience: float) -> Array:
        """Return the blocks that go on, now and then those too that wait for what others do."""
        waits = self._threads.idle() & (self._launch.random.random(len(self.behind)) < patience)
        some: Array = np.flatnonzero((self.behind != _EXITED) & ~waits)
        return some

    def finish(self) -> None:
        """Run them to their end, each basic block in an order that is drawn."""
        steps, random = _MAX_STEPS * len(self._owner), self._launch.random
        for _ in range(steps):
            self._launch.machine.now += 1
            going = np.flatnonzero(self.behind != _EXITED)
            if len(going) == 0:
                if self._waits.any():
                    raise self._hang("threads wait at a barrier for others that have exited")
                return
            positions = np.unique(self.behind[going])
            position = positions[random.integers(len(positions))]
            chosen = going[self.behind[going] == position]
            chosen = chosen[random.random(len(chosen)) < (0.5, 1.0)[random.integers(2)]]
            if len(chosen) and self.go(int(position), chosen):
                return
        raise self._hang(f"no end after {steps} basic blocks")

    def go(self, position: int, blocks: Array) -> list[Launch]:
        """Take blocks through the basic block where each is furthest behind.

        Returns: the launches that have ended by it.
        """
        active = np.zeros(self._at.shape, bool)
        active[blocks] = (self._at[blocks] == position) & ~self._waits[blocks]
        if self._launch.clocks:
            self._launch.clocks.time += 1
        self._run(position, np.flatnonzero(active))
        self._pass_barriers(blocks)
        self.behind[blocks] = np.where(self._waits[blocks], _EXITED, self._at[blocks]).min(axis=1)
        return self._ended() if (self._at[blocks, 0] == _EXITED).any() else []

    def _ended(self) -> list[Launch]:
        """Return the launches that have ended since this was asked."""
        running = (self._at != _EXITED).any(axis=1) | self._asleep
        some = np.bincount(self._owner[running], minlength=len(self.launches)) > 0
        ended = np.flatnonzero(self._left & ~some)
        self._left[ended] = False
        self._asleep[np.isin(self._owner, ended)] = True
        return [self.launches[k] for k in ended]

    def where(self) -> str:
        """Return where its blocks stand that have not ended, in words."""
        stand: dict[str, list[int]] = {}
        for slot in np.lexsort((self._blocks, self.rank)):
            at = int(self._at[slot].min())
            if at != _EXITED and not self._asleep[slot]:
                first = self._launch.program.basic_blocks[at]
                text = first[0].text if first else "the end of the program"
                rank = f"rank {self.rank[slot]}, " if self._patient else ""
                stand.setdefault(f"{rank}programs {{}} before {text}", []).append(
                    int(self._blocks[slot])
                )
        return ", ".join(
            text.replace("{}", " ".join(map(str, those)), 1) for text, those in stand.items()
        )

    def _hang(self, what: str) -> HangError:
        return HangError(f"{self.name}: {what}: {self.where()}")

    def _pass_barriers(self, blocks: Array) -> None:
        """Let the threads of each block pass a barrier that all of them have reached."""
        blocks = blocks[self._waits[blocks].all(axis=1)]
        if (self._at[blocks] != self._at[blocks, :1]).any():
            raise self._hang("the threads of a block wait at different barriers")
        self._waits[blocks] = False
        if self._launch.clocks and len(blocks):
            self._launch.clocks.barrier(self._numbers[blocks])

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
                program = self._launch.program
                if instruction.operands != (Immediate(-1),) or program.threads != WARP:
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

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
from tests.ptx_emulator.threads import Threads, listed

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
            _Residents([common], [order[first : first + resident]]).finish()


def launch_together(started: Sequence[Started], *, seed: int = 0, races: bool = True) -> None:
    """Run launches of several ranks at once, each on a GPU of its own, to their ends.

    Which go on is drawn anew at each basic block, so that their programs are interleaved; how often
    each rank's do changes, so that now one and now another stands nearly still.

    Args:
        started: Their launches, of equally many threads a block; those of a rank in order.
        seed: Of everything that is random.
        races: Whether to look for data races, those between ranks among them.

    Raises:
        NotImplementedError, AccessError, RaceError, HangError: As `launch` does.
    """
    machine, launches = set_up(started, seed, races, dependent=False)
    with np.errstate(all="ignore"):
        _Streams(machine, launches).finish()


class _Streams:
    """The launches of all ranks, of which each begins when its rank's one before has ended.

    Blocks of one program run together, whichever launch they are of, unless traffic is counted.
    """

    def __init__(self, machine: Machine, launches: Sequence[Launch]) -> None:
        self._machine, self._launches = machine, launches
        pools: dict[object, list[Launch]] = {}
        self._coming: dict[int, list[Launch]] = {}
        for one in launches:
            pools.setdefault(id(one.program if one.traffic is None else one), []).append(one)
            self._coming.setdefault(one.rank, []).append(one)
        self._pools = [
            _Residents(some, [machine.random.permutation(one.grid) for one in some], asleep=True)
            for some in pools.values()
        ]
        self._pool = {id(one): pool for pool in self._pools for one in pool.launches}
        # When the first of each rank's launches begins that has not.
        self._begins = {rank: coming[0].delay for rank, coming in self._coming.items()}

    def finish(self) -> None:
        """Run all to their ends."""
        random, machine = self._machine.random, self._machine
        ranks = 1 + max(one.rank for one in self._launches)
        steps = _MAX_STEPS * sum(one.grid for one in self._launches)
        last = steps + sum(one.delay for one in self._launches)
        pace = np.ones(ranks)
        while machine.now < last:
            machine.now += 1
            if machine.now % _SAME_PACE == 1:
                pace = np.array([1.0, 0.3, 0.02])[random.integers(3, size=ranks)]
            for rank in [k for k, at in self._begins.items() if at < machine.now]:
                del self._begins[rank]
                self._pool[id(self._coming[rank][0])].wake(self._coming[rank][0])
            awake = [pool for pool in self._pools if pool.awake]
            if not awake:
                if not self._begins:
                    return
                continue
            pool = awake[random.integers(len(awake))]
            for ended in pool.step(pace):
                self._end(ended)
        stand = "; ".join(filter(None, (pool.where() for pool in self._pools)))
        raise HangError(f"{self._pools[0].name}: no end after {steps} basic blocks: {stand}")

    def _end(self, ended: Launch) -> None:
        """Let the next of a rank's launches begin."""
        coming = self._coming[ended.rank]
        coming.pop(0)
        if coming:
            if self._machine.clocks:
                self._machine.clocks.follow(ended.blocks, coming[0].blocks)
            self._begins[ended.rank] = self._machine.now + coming[0].delay


class _Residents:
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
        self._rank = np.array([one.rank for one in launches])[self._owner]
        self._blocks = np.concatenate(blocks)
        # Of each thread, the basic block it comes to next, and whether it waits there for the
        # others of its block.
        self._at = np.zeros((len(self._owner), self._launch.program.threads), np.int64)
        self._waits = np.zeros(self._at.shape, bool)
        self._asleep, self._patient = np.full(len(self._owner), asleep), asleep
        # Of each block, where those of its threads are that are furthest behind.
        self._behind = np.full(len(self._owner), _EXITED if asleep else 0)
        self._left = np.ones(len(launches), bool)

    @property
    def awake(self) -> bool:
        """Whether any block runs."""
        return not self._asleep.all()

    def wake(self, launch: Launch) -> None:
        """Let a launch begin."""
        mine = self._owner == self.launches.index(launch)
        self._asleep[mine], self._behind[mine] = False, 0

    def finish(self) -> None:
        """Run them to their end."""
        steps = _MAX_STEPS * len(self._owner)
        for _ in range(steps):
            self._launch.machine.now += 1
            if self.step():
                return
        raise self._hang(f"no end after {steps} basic blocks")

    def step(self, pace: Array | None = None) -> list[Launch]:
        """Take some of them through one basic block; return the launches that have ended by it.

        pace: how often each rank's blocks go on, at most 1.
        """
        going = np.flatnonzero(self._behind != _EXITED)
        if len(going) == 0:
            if self._waits.any():
                raise self._hang("threads wait at a barrier for others that have exited")
            return self._ended()
        chosen = self._choose(going, pace)
        if len(chosen) == 0:
            return []
        position = self._behind[chosen[0]]
        active = np.zeros(self._at.shape, bool)
        active[chosen] = (self._at[chosen] == position) & ~self._waits[chosen]
        if self._launch.clocks:
            self._launch.clocks.time += 1
        self._run(int(position), np.flatnonzero(active))
        self._pass_barriers(chosen)
        self._behind[chosen] = np.where(self._waits[chosen], _EXITED, self._at[chosen]).min(axis=1)
        return self._ended() if (self._at[chosen, 0] == _EXITED).any() else []

    def _choose(self, going: Array, pace: Array | None) -> Array:
        """Return some of the blocks that are `going`, all furthest behind at one basic block."""
        random = self._launch.random
        if pace is None:
            positions = np.unique(self._behind[going])
            position = positions[random.integers(len(positions))]
        else:
            paces = np.cumsum(pace[self._rank[going]])
            drawn = going[np.searchsorted(paces, random.random() * paces[-1], side="right")]
            position = self._behind[drawn]
        chosen: Array = going[self._behind[going] == position]
        some = chosen[random.random(len(chosen)) < (0.5, 1.0)[random.integers(2)]]
        if pace is None:
            return some
        some = some[random.random(len(some)) < pace[self._rank[some]]]
        if len(some) == 0:
            some = np.array([drawn])
        if random.random() < _PATIENCE:
            some = np.array([x for x in some if not self._threads.idles(int(x))], np.int64)
        return some

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
        for slot in np.lexsort((self._blocks, self._rank)):
            at = int(self._at[slot].min())
            if at != _EXITED and not self._asleep[slot]:
                first = self._launch.program.basic_blocks[at]
                text = first[0].text if first else "the end of the program"
                rank = f"rank {self._rank[slot]}, " if self._patient else ""
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
        for slot in blocks[self._waits[blocks].all(axis=1)]:
            if (self._at[slot] != self._at[slot][0]).any():
                raise self._hang("the threads of a block wait at different barriers")
            self._waits[slot] = False
            if self._launch.clocks:
                first = self.launches[self._owner[slot]].first
                self._launch.clocks.barrier(first + int(self._blocks[slot]))

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
                if instruction.operands != (Immediate(-1),) or program.threads != program.warp:
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

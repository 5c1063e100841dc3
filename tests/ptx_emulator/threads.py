"""Threads that execute instructions together: arithmetic, memory, and what a warp does as one.

Every instruction is looked up by its whole opcode, in `arithmetic.OPERATIONS` or in the tables of
opcodes.py; one that is in none of them raises NotImplementedError with its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np

from tests.ptx_emulator.arithmetic import OPERATIONS, Array, Operation, from_bits, numpy_type
from tests.ptx_emulator.launches import Launch
from tests.ptx_emulator.memory import AccessError, GlobalMemory, SharedMemory
from tests.ptx_emulator.opcodes import (
    ATOMICS,
    CONTROL,
    LOADS,
    MATRICES,
    PARAMETER_LOADS,
    POLICIES,
    REDUCTIONS,
    SHUFFLES,
    STORES,
    UPDATES,
    WAITS,
    Access,
    Atomic,
)
from tests.ptx_emulator.parse import (
    Address,
    Immediate,
    Instruction,
    Name,
    Operand,
    Program,
    Register,
    Vector,
)
from tests.ptx_emulator.registers import Registers

# Threads of NVIDIA's warps.
WARP = 32


Method = Callable[["Threads", Instruction, Any, "Array | None"], None]
# An instruction, its method and its entry in the table that lists it.
Listed = tuple[Instruction, Method, Any]


@cache
def _found(instruction: Instruction) -> tuple[Method, Any]:
    """Return the method for an instruction and its entry in the table that lists it."""
    opcode, operands = instruction.opcode, instruction.operands
    if any(isinstance(operand, Vector) for operand in operands) and opcode in (
        "mov.b32",
        "mov.b64",
    ):
        return Threads._repack, opcode[4:]
    operation = OPERATIONS.get((opcode, len(operands) - 1))
    if operation is not None:
        return Threads._compute, operation
    for table, method in _TABLES:
        if opcode in table:
            return method, table[opcode]
    raise NotImplementedError(
        f"{instruction.text}: this instruction of {max(0, len(operands) - 1)} sources is not "
        "listed: add it, with its type and modifiers, to tests/ptx_emulator"
    )


def listed(program: Program) -> list[list[Listed]]:
    """Return the instructions of each basic block with what the tables have for them.

    Raises:
        NotImplementedError: One that is in no table.
    """
    return [
        [(one, *(_CONTROL if one.opcode in CONTROL else _found(one))) for one in block]
        for block in program.basic_blocks
    ]


def is_seen(listed: Listed) -> bool:
    """Return whether other blocks can tell when an instruction is executed, if none races."""
    entry = listed[2]
    return isinstance(entry, Atomic) or (isinstance(entry, Access) and entry.order != "weak")


class Threads:
    """The threads of the blocks that are resident at once.

    Everywhere, `index` says which of them execute an instruction, None all of them.
    """

    def __init__(self, launches: Sequence[Launch], blocks: Sequence[Array]) -> None:
        """Set up those of some blocks of each launch, all of one program."""
        launch = launches[0]
        program = launch.program
        width, counts = program.threads, [len(some) for some in blocks]
        count = sum(counts)
        self._launch = launch
        self._slot = np.repeat(np.arange(count), width)

        def each(values: Sequence[int] | Array) -> Array:
            """Return for each thread what its launch has."""
            return np.repeat(np.array(values), np.array(counts) * width)

        lane, block = np.tile(np.arange(width), count), np.repeat(np.concatenate(blocks), width)
        self._thread = (each([one.first for one in launches]) + block) * width + lane
        self._arguments: dict[str, int | Array] = {}
        for name in program.parameters:
            values = [one.arguments[name] % 2**64 for one in launches]
            same = len(set(values)) == 1
            self._arguments[name] = values[0] if same else each(np.array(values, np.uint64))
        self._warp = self._thread // WARP
        # What a block may wait for: how often it has read the same once more, of how many bytes,
        # by which threads, and where each of those read what.
        self._again, self._bytes = np.full(count, -1), np.zeros(count, np.int64)
        self._reads = np.zeros(width * count, bool)
        self._read_at, self._was = (np.zeros(width * count, np.uint64) for _ in range(2))
        self._waited = np.full(width * count, not launch.dependent)
        self._shared = SharedMemory(launch.shared_size, count, launch.clocks)
        special = {
            "%tid.x": lane,
            "%ctaid.x": block,
            "%nctaid.x": each([one.grid for one in launches]),
            "global_smem": np.zeros(width * count, np.int64),
            # Threads look at different times, so that none may take another's for its own.
            "%globaltimer": lambda: launch.machine.now + lane % 7,
        }
        self._registers = Registers(program.registers, width * count, special, launch.random)

    def holds(self, register: Register, wanted: bool, index: Array | None) -> Array:
        """Return for each thread whether a predicate has that value."""
        return self._registers.read(register, "pred", index) == wanted

    def execute(self, listed: Listed, index: Array | None) -> None:
        """Execute any instruction but branches, returns and barriers.

        Raises:
            NotImplementedError: The instruction or an operand of it is not known.
            AccessError: It is no access that may be made here.
        """
        instruction, method, entry = listed
        if ".global" in instruction.opcode:
            self.require_wait(instruction, index)
            if not (isinstance(entry, Atomic) or entry.order != "weak"):
                self._go_on(index)
        try:
            method(self, instruction, entry, index)
        except NotImplementedError as error:
            raise NotImplementedError(f"{instruction.text}: {error}") from error

    def _go_on(self, index: Array | None) -> None:
        """Forget what blocks wait for that access something else."""
        self._again[self._slot[slice(None) if index is None else index]] = -1

    def _poll(self, addresses: Array, values: Array, index: Array | None) -> None:
        """Remember what blocks read that may be waiting for it to change."""
        threads = np.arange(len(self._slot)) if index is None else index
        blocks, width = np.unique(self._slot[threads]), self._launch.program.threads
        reads = np.zeros(len(self._slot), bool)
        reads[threads] = True
        others = (reads != self._reads).reshape(-1, width)[blocks].any(axis=1)
        changed = (self._read_at[threads] != addresses) | (self._was[threads] != values)
        self._again[blocks] += 1
        self._again[blocks[others]] = self._again[self._slot[threads[changed]]] = 0
        self._bytes[blocks] = values.dtype.itemsize
        self._reads.reshape(-1, width)[blocks] = reads.reshape(-1, width)[blocks]
        self._read_at[threads], self._was[threads] = addresses, values

    def idle(self) -> Array:
        """Return for each block whether it only loads, again and again, what has not changed."""
        idle = self._again >= 1
        for size in np.unique(self._bytes[idle]):
            mine = (idle & (self._bytes == size))[self._slot]
            threads = np.flatnonzero(self._reads & mine)
            now = self._launch.memory.peek(self._read_at[threads], int(size))
            idle[self._slot[threads[now != self._was[threads]]]] = False
        return idle

    def require_wait(self, instruction: Instruction, index: Array | None) -> None:
        """Raise AccessError if threads that must wait for the launch ahead have not done so."""
        if not self._waited[slice(None) if index is None else index].all():
            raise AccessError(
                f"{instruction.text}: before griddepcontrol.wait, in a launch with launch_pdl"
            )

    def _wait(self, instruction: Instruction, entry: None, index: Array | None) -> None:
        self._waited[slice(None) if index is None else index] = True

    def _compute(self, instruction: Instruction, operation: Operation, index: Array | None) -> None:
        target, *sources = instruction.operands
        values = [
            self._registers.read(source, kind, index)
            for source, kind in zip(sources, operation.sources, strict=True)
        ]
        self._registers.write(target, operation.result, operation.compute(*values), index)

    def _control(self, instruction: Instruction, entry: None, index: Array | None) -> None:
        raise AssertionError(f"{instruction.text}: machine.py does this itself")

    def _repack(self, instruction: Instruction, kind: str, index: Array | None) -> None:
        """Move between one register and its halves or quarters."""
        target, source = instruction.operands
        if isinstance(target, Vector):
            self._registers.split(target, source, kind, index)
        else:
            assert isinstance(source, Vector)
            self._registers.join(target, source, kind, index)

    # Memory

    def _address(self, operand: Operand, shared: bool, index: Array | None) -> Array:
        assert isinstance(operand, Address)
        base = self._registers.read_each(operand.base, "u32" if shared else "u64", index)
        return np.asarray(base + np.array(operand.offset).astype(base.dtype))

    def _access(
        self, instruction: Instruction, access: Access, address: Operand, index: Array | None
    ) -> tuple[Array, Array]:
        """Return addresses and threads of a load or store, whose traffic is counted here."""
        addresses = self._address(address, access.shared, index)
        size = np.dtype(numpy_type(access.kind)).itemsize * access.count
        chosen = slice(None) if index is None else index
        if access.shared:
            slots = self._slot[chosen]
            addresses = self._shared.address(slots, addresses, size, instruction.text)
        elif self._launch.traffic is not None:
            store = instruction.opcode in STORES
            past = store or access.order != "weak" or instruction.opcode.startswith("ld.global.cg")
            warps, width = self._warp[chosen], self._launch.program.threads // WARP
            self._launch.traffic.count(addresses, warps, size, store, None if past else width)
        return addresses, self._thread[chosen]

    def _memory(self, access: Access) -> SharedMemory | GlobalMemory:
        return self._shared if access.shared else self._launch.memory

    def _load_parameter(self, instruction: Instruction, kind: str, index: Array | None) -> None:
        target, address = instruction.operands
        assert isinstance(address, Address) and isinstance(address.base, Name)
        held = self._arguments[address.base.text]
        if isinstance(held, int):
            value = from_bits(kind, held)
        else:
            dtype = np.dtype(numpy_type(kind))
            chosen = held[slice(None) if index is None else index]
            value = chosen.astype(f"u{dtype.itemsize}").view(dtype)
        self._registers.write_extended(target, kind, value, index)

    def _load(self, instruction: Instruction, access: Access, index: Array | None) -> None:
        target, address, *_ = instruction.operands
        parts = _parts(target, access.count)
        addresses, threads = self._access(instruction, access, address, index)
        if access.order == "acquire" and self._launch.clocks:
            for one, thread in zip(addresses, threads, strict=True):
                self._launch.clocks.acquire(int(thread), int(one), access.scope == "sys")
        width = np.dtype(numpy_type(access.kind)).itemsize
        values = self._memory(access).load(
            addresses,
            width,
            access.count,
            threads,
            instruction.text,
            strong=None if access.order == "weak" else access.scope,
        )
        if access.order != "weak":
            self._poll(addresses, values[0], index)
        for part, value in zip(parts, values, strict=True):
            typed = value.view(numpy_type(access.kind))
            self._registers.write_extended(part, access.kind, typed, index)

    def _store(self, instruction: Instruction, access: Access, index: Array | None) -> None:
        address, source, *_ = instruction.operands
        parts = _parts(source, access.count)
        addresses, threads = self._access(instruction, access, address, index)
        bits = f"b{8 * np.dtype(numpy_type(access.kind)).itemsize}"
        values = [self._registers.read_each(part, bits, index) for part in parts]
        self._memory(access).store(addresses, values, threads, instruction.text)

    def _make_policy(self, instruction: Instruction, kind: str, index: Array | None) -> None:
        """Caches are not emulated: any bits will do."""
        self._registers.write(instruction.operands[0], kind, np.uint64(0), index)

    def _atomic(self, instruction: Instruction, atomic: Atomic, index: Array | None) -> None:
        *target, address, source = instruction.operands
        addresses = self._address(address, False, index)
        values = self._registers.read_each(source, atomic.kind, index)
        threads = self._thread if index is None else self._thread[index]
        clocks, update = self._launch.clocks, UPDATES[atomic.operation]
        kind, system = numpy_type(atomic.kind), atomic.scope == "sys"
        results = np.empty(len(addresses), kind)
        for turn in _turns(addresses, self._launch.random):
            each = [*zip(threads[turn].tolist(), addresses[turn].tolist(), strict=True)]
            if clocks and atomic.order in ("acq_rel", "acquire"):
                for one in each:
                    clocks.acquire(*one, system)
            those = values[turn]
            results[turn] = self._launch.memory.atomic(
                addresses[turn],
                lambda old, those=those: update(old, those),
                kind,
                threads[turn],
                instruction.text,
                system,
            )
            if clocks and atomic.order in ("acq_rel", "release"):
                for one in each:
                    clocks.release(*one, system)
        for register in target:
            self._registers.write(register, atomic.kind, results, index)
        bits = results.view(f"u{results.itemsize}")
        taken = np.arange(len(self._slot)) if index is None else index
        changed = self._launch.memory.peek(addresses, results.itemsize) != bits
        updates = np.isin(self._slot[taken], self._slot[taken[changed]])
        self._go_on(taken[updates])
        self._poll(addresses[~updates], bits[~updates], taken[~updates])

    # What the threads of a warp do together

    def _require_warps(
        self, instruction: Instruction, index: Array | None, members: Operand
    ) -> None:
        """Raise AccessError unless whole warps execute this, as the full mask says."""
        mask = np.atleast_1d(self._registers.read(members, "u32", index))
        whole = index is None or (
            len(index) % WARP == 0
            and (index.reshape(-1, WARP) == index[::WARP, None] + np.arange(WARP)).all()
            and (index[::WARP] % WARP == 0).all()
        )
        if (mask != 0xFFFFFFFF).any() or not whole:
            raise AccessError(f"{instruction.text}: not all threads of a warp execute it")

    def _shuffle(self, instruction: Instruction, named: bool, index: Array | None) -> None:
        target, source, lanes, clamp, members = instruction.operands
        if clamp != Immediate(31) or not (named or isinstance(lanes, Immediate)):
            raise NotImplementedError("only lanes within a whole warp are known")
        self._require_warps(instruction, index, members)
        values = self._registers.read_each(source, "b32", index).reshape(-1, WARP)
        chosen = self._registers.read_each(lanes, "u32", index).reshape(-1, WARP) % WARP
        order = chosen if named else np.arange(WARP) ^ chosen
        moved = np.take_along_axis(values, order.astype(np.int64), axis=1)
        self._registers.write(target, "b32", moved.reshape(-1), index)

    def _reduce(self, instruction: Instruction, operation: Operation, index: Array | None) -> None:
        target, source, members = instruction.operands
        self._require_warps(instruction, index, members)
        values = self._registers.read_each(source, operation.result, index)
        result = reduce(operation.compute, values.reshape(-1, WARP).T)
        self._registers.write(target, operation.result, np.repeat(result, WARP), index)

    def _load_matrices(self, instruction: Instruction, count: int, index: Array | None) -> None:
        """Load 8 x 8 matrices of 16 bits: lane 8m + r names row r of matrix m, and lane 4r + w gets
        word w of row r of each."""
        target, address = instruction.operands
        registers, lanes = _parts(target, count), slice(None, 8 * count)
        self._require_warps(instruction, index, Immediate(-1))
        chosen = slice(None) if index is None else index
        addresses = self._address(address, True, index)
        flat = self._shared.address(self._slot[chosen], addresses, 16, instruction.text)
        rows, threads = (
            each.reshape(-1, WARP)[:, lanes].reshape(-1) for each in (flat, self._thread[chosen])
        )
        words = self._shared.load(rows, 4, 4, threads, instruction.text)
        matrices = np.stack(words, axis=1).reshape(-1, count, WARP)
        for matrix, register in enumerate(registers):
            self._registers.write(register, "b32", matrices[:, matrix].reshape(-1), index)


def _turns(addresses: Array, random: np.random.Generator) -> Iterator[Array]:
    """Yield threads that update numbers one after another: at no address two of them at once.

    At each address their order is random. At different ones it is of no account: a thread updates
    one number and waits for no other.
    """
    order = random.permutation(len(addresses))
    order = order[np.argsort(addresses[order], kind="stable")]
    _, first, counts = np.unique(addresses[order], return_index=True, return_counts=True)
    for turn in range(int(counts.max(initial=0))):
        yield order[first[counts > turn] + turn]


def _parts(operand: Operand, count: int) -> tuple[Operand, ...]:
    """Return the registers that an access names, which must be `count`."""
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(parts) != count:
        raise NotImplementedError(f"{len(parts)} registers for an access of {count}")
    return parts


_CONTROL = Threads._control, None
_TABLES: tuple[tuple[dict[str, Any], Method], ...] = (
    (PARAMETER_LOADS, Threads._load_parameter),
    (LOADS, Threads._load),
    (STORES, Threads._store),
    (POLICIES, Threads._make_policy),
    (ATOMICS, Threads._atomic),
    (SHUFFLES, Threads._shuffle),
    (REDUCTIONS, Threads._reduce),
    (MATRICES, Threads._load_matrices),
    (WAITS, Threads._wait),
)

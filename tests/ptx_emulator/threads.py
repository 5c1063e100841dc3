"""Threads that execute instructions together: their registers, memory, and warps."""

from __future__ import annotations

from functools import cache, reduce

import numpy as np

from tests.ptx_emulator.arithmetic import Array, from_bits, numpy_type, operation
from tests.ptx_emulator.memory import AccessError, GlobalMemory, SharedMemory, Traffic
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
from tests.ptx_emulator.races import Clocks

WARP = 32
_WIDTHS = {"p": 1, "rs": 2, "r": 4, "rd": 8}
_METHODS = {
    "ld": "_load", "st": "_store", "atom": "_atomic", "ldmatrix": "_load_matrices",
    "stmatrix": "_store_matrices", "shfl": "_shuffle", "redux": "_reduce",
}  # fmt: skip


@cache
def _bank_type(bank: str, kind: str) -> str:
    """The numpy type under which a register is read as a PTX type. TypeError: widths differ."""
    dtype = np.dtype(numpy_type(kind))
    if dtype.itemsize != _WIDTHS[bank]:
        raise TypeError(f"a register of {8 * _WIDTHS[bank]} bits is used as {kind}")
    return dtype.str


def _transposed(matrices: Array) -> Array:
    """Of 8 x 8 elements of 16 bits, each matrix in 32 words."""
    elements = np.ascontiguousarray(matrices).view(np.uint16).reshape(*matrices.shape[:-1], 8, 8)
    turned = np.ascontiguousarray(elements.swapaxes(-1, -2))
    return turned.reshape(*matrices.shape[:-1], 2 * WARP).view(np.uint32)


class Launch:
    """What all threads of a launch share.

    traffic: filled while they run, where given. clocks: where given, races are looked for.
    """

    def __init__(
        self,
        program: Program,
        grid: int,
        arguments: dict[str, int],
        shared: int,
        random: np.random.Generator,
        clocks: Clocks | None,
        traffic: Traffic | None,
    ) -> None:
        self.program, self.grid, self.arguments = program, grid, arguments
        self.shared_size, self.random = shared, random
        self.clocks, self.traffic = clocks, traffic
        self.memory = GlobalMemory(clocks)


class Threads:
    """Those of the blocks that are resident at once.

    Everywhere, `index` says which of them execute an instruction, None all of them.
    """

    def __init__(self, launch: Launch, blocks: Array) -> None:
        program = launch.program
        width, count = program.threads, len(blocks)
        self.count = width * count
        self._launch = launch
        self._block = np.repeat(blocks, width)
        self._slot = np.repeat(np.arange(count), width)
        self._lane = np.tile(np.arange(width), count)
        self._thread = self._block * width + self._lane
        self._warp = self._thread // WARP
        self._shared = SharedMemory(launch.shared_size, count, launch.clocks)
        self._banks: dict[str, dict[str, Array]] = {}
        for bank, size in program.registers.items():
            # Garbage, as a register holds that nothing was written to.
            raw = np.frombuffer(launch.random.bytes(64 * _WIDTHS[bank]), np.uint8)
            values = np.resize(raw, size * self.count * _WIDTHS[bank])
            dtype = np.dtype(f"u{_WIDTHS[bank]}") if bank != "p" else np.dtype(bool)
            plain = (values & 1).astype(bool) if bank == "p" else values.view(dtype)
            self._banks[bank] = {dtype.str: plain.reshape(size, self.count)}

    def holds(self, register: Register, wanted: bool, index: Array | None) -> Array:
        """For each thread, whether a predicate has that value."""
        return self._read(register, "pred", index) == wanted

    def execute(self, instruction: Instruction, index: Array | None) -> None:
        """Any instruction but branches, returns and barriers."""
        name = instruction.parts[0]
        if name in _METHODS:
            getattr(self, _METHODS[name])(instruction, index)
        elif name == "mov" and any(isinstance(x, Vector) for x in instruction.operands):
            self._repack(instruction, index)
        else:
            known = operation(instruction.parts, len(instruction.operands) - 1)
            target, *sources = instruction.operands
            values = [
                self._read(source, kind, index)
                for source, kind in zip(sources, known.sources, strict=True)
            ]
            self._write(target, known.result, known.compute(*values), index)

    # Registers

    def _row(self, register: Register, kind: str) -> Array:
        dtype = _bank_type(register.bank, kind)
        views = self._banks[register.bank]
        if dtype not in views:
            views[dtype] = next(iter(views.values())).view(dtype)
        row: Array = views[dtype][register.number]
        return row

    def _read(self, operand: Operand, kind: str, index: Array | None) -> Array:
        if isinstance(operand, Register):
            row = self._row(operand, kind)
            return row if index is None else row[index]
        if isinstance(operand, Immediate):
            return from_bits(kind, operand.bits)
        if isinstance(operand, Name):
            if operand.text == "%tid.x":
                values = self._lane
            elif operand.text == "%ctaid.x":
                values = self._block
            elif operand.text == "%nctaid.x":
                return from_bits(kind, self._launch.grid)
            elif operand.text == "global_smem":
                return from_bits(kind, 0)
            else:
                raise NotImplementedError(f"no value is known for {operand.text}")
            return (
                values.astype(numpy_type(kind))
                if index is None
                else values[index].astype(numpy_type(kind))
            )
        raise NotImplementedError(f"{operand} as a value")

    def _write(self, operand: Operand, kind: str, values: Array, index: Array | None) -> None:
        if operand == Name("_"):
            return
        assert isinstance(operand, Register)
        self._row(operand, kind)[slice(None) if index is None else index] = values

    def _count(self, index: Array | None) -> int:
        return self.count if index is None else len(index)

    def _repack(self, instruction: Instruction, index: Array | None) -> None:
        """mov between one register and the halves or quarters of it."""
        target, source = instruction.operands
        whole = numpy_type(instruction.parts[1])
        if isinstance(target, Vector):
            width = np.dtype(whole).itemsize // len(target.parts)
            value = np.broadcast_to(
                self._read(source, instruction.parts[1], index), self._count(index)
            )
            parts = np.ascontiguousarray(value).view(f"u{width}").reshape(-1, len(target.parts))
            for k, part in enumerate(target.parts):
                self._write(part, f"b{8 * width}", parts[:, k], index)
            return
        assert isinstance(source, Vector)
        width = np.dtype(whole).itemsize // len(source.parts)
        values = [
            np.broadcast_to(self._read(part, f"b{8 * width}", index), self._count(index))
            for part in source.parts
        ]
        packed = np.ascontiguousarray(np.stack(values, axis=1)).view(whole).reshape(-1)
        self._write(target, instruction.parts[1], packed, index)

    # Memory

    def _address(self, operand: Operand, shared: bool, index: Array | None) -> Array:
        assert isinstance(operand, Address)
        kind = "u32" if shared else "u64"
        base = np.broadcast_to(self._read(operand.base, kind, index), self._count(index))
        return np.asarray(base + np.array(operand.offset).astype(base.dtype))

    def _access(
        self, instruction: Instruction, place: Operand, data: Operand, index: Array | None
    ) -> tuple[tuple[Operand, ...], str, Array, Array, bool]:
        """Registers, their type, addresses, threads and whether memory is shared."""
        parts = data.parts if isinstance(data, Vector) else (data,)
        kind = instruction.parts[-1]
        shared = "shared" in instruction.parts
        addresses = self._address(place, shared, index)
        size = np.dtype(numpy_type(kind)).itemsize * len(parts)
        every = slice(None) if index is None else index
        threads = self._thread[every]
        if shared:
            slots = self._slot[every]
            addresses = self._shared.address(slots, addresses, size, instruction.text)
        elif self._launch.traffic is not None:
            store = instruction.parts[0] == "st"
            self._launch.traffic.note(addresses, self._warp[every], size, store)
        return parts, kind, addresses, threads, shared

    def _load(self, instruction: Instruction, index: Array | None) -> None:
        target, place = instruction.operands
        if instruction.parts[1] == "param":
            assert isinstance(place, Address) and isinstance(place.base, Name)
            kind = instruction.parts[2]
            self._write_loaded(
                target, kind, from_bits(kind, self._launch.arguments[place.base.text]), index
            )
            return
        parts, kind, addresses, threads, shared = self._access(instruction, place, target, index)
        if "acquire" in instruction.parts:
            self._acquire(addresses, threads)
        memory = self._shared if shared else self._launch.memory
        width = np.dtype(numpy_type(kind)).itemsize
        values = memory.load(
            addresses, width, len(parts), threads, instruction.text,
            racing="acquire" not in instruction.parts,
        )  # fmt: skip
        for part, value in zip(parts, values, strict=True):
            self._write_loaded(part, kind, value.view(numpy_type(kind)), index)

    def _write_loaded(self, target: Operand, kind: str, values: Array, index: Array | None) -> None:
        """What was loaded is extended to the width of its register."""
        assert isinstance(target, Register)
        width = _WIDTHS[target.bank]
        if kind[0] in "bus" and width > values.dtype.itemsize:
            kind = f"{kind[0]}{8 * width}"
            values = values.astype(numpy_type(kind))
        self._write(target, kind, values, index)

    def _store(self, instruction: Instruction, index: Array | None) -> None:
        place, source = instruction.operands
        parts, kind, addresses, threads, shared = self._access(instruction, place, source, index)
        memory = self._shared if shared else self._launch.memory
        bits = f"b{8 * np.dtype(numpy_type(kind)).itemsize}"
        values = [np.broadcast_to(self._read(x, bits, index), len(threads)) for x in parts]
        memory.store(addresses, values, threads, instruction.text)

    def _acquire(self, addresses: Array, threads: Array) -> None:
        if self._launch.clocks:
            for address, thread in zip(addresses, threads, strict=True):
                self._launch.clocks.acquire(int(thread), int(address))

    def _atomic(self, instruction: Instruction, index: Array | None) -> None:
        space, scope, *order, what, kind = instruction.parts[1:]
        if (space, scope, what, kind) != ("global", "gpu", "add", "u64"):
            raise NotImplementedError(instruction.text)
        target, place, source = instruction.operands
        addresses = self._address(place, False, index)
        values = np.broadcast_to(self._read(source, kind, index), len(addresses))
        threads = self._thread if index is None else self._thread[index]
        results = np.empty(len(addresses), np.uint64)
        for i in self._launch.random.permutation(len(addresses)):
            address, thread = int(addresses[i]), int(threads[i])
            if self._launch.clocks and order in (["acq_rel"], ["acquire"]):
                self._launch.clocks.acquire(thread, address)
            results[i] = self._launch.memory.exchange_add(
                address, int(values[i]), thread, instruction.text
            )
            if self._launch.clocks and order in (["acq_rel"], ["release"]):
                self._launch.clocks.release(thread, address)
        self._write(target, kind, results, index)

    # What the threads of a warp do together

    def _warps(self, instruction: Instruction, index: Array | None, members: Operand) -> None:
        """AccessError unless whole warps are here, as the full mask says."""
        mask = np.atleast_1d(self._read(members, "u32", index))
        here = self._count(index)
        whole = index is None or (
            here % WARP == 0
            and (index.reshape(-1, WARP) == index[::WARP, None] + np.arange(WARP)).all()
            and (index[::WARP] % WARP == 0).all()
        )
        if (mask != 0xFFFFFFFF).any() or not whole:
            raise AccessError(f"{instruction.text}: not all threads of a warp are here")

    def _shuffle(self, instruction: Instruction, index: Array | None) -> None:
        target, source, lanes, clamp, members = instruction.operands
        if instruction.parts[1:] != ("sync", "bfly", "b32") or clamp != Immediate(31):
            raise NotImplementedError(instruction.text)
        self._warps(instruction, index, members)
        assert isinstance(lanes, Immediate)
        values = np.broadcast_to(self._read(source, "b32", index), self._count(index))
        order = np.arange(WARP) ^ lanes.bits
        self._write(target, "b32", values.reshape(-1, WARP)[:, order].reshape(-1), index)

    def _reduce(self, instruction: Instruction, index: Array | None) -> None:
        target, source, members = instruction.operands
        kind = instruction.parts[-1]
        if instruction.parts[1:-1] != ("sync", "max"):
            raise NotImplementedError(instruction.text)
        self._warps(instruction, index, members)
        values = np.broadcast_to(self._read(source, kind, index), self._count(index))
        compute = operation(("max", kind), 2).compute
        most = reduce(compute, values.reshape(-1, WARP).T)
        self._write(target, kind, np.repeat(most, WARP), index)

    def _matrices(
        self, instruction: Instruction, data: Operand, place: Operand, index: Array | None
    ) -> tuple[tuple[Operand, ...], Array, Array]:
        """Registers of 8 x 8 matrices of 16 bits, one each; addresses of their rows, and the
        threads that have them: lane 8m + r that of row r of matrix m."""
        parts = instruction.parts
        registers = data.parts if isinstance(data, Vector) else (data,)
        rest = tuple(part for part in parts[5:] if part != "trans")
        if parts[1:4] != ("sync", "aligned", "m8n8") or rest != ("shared", "b16"):
            raise NotImplementedError(instruction.text)
        self._warps(instruction, index, Immediate(-1))
        every = slice(None) if index is None else index
        addresses = self._address(place, True, index)
        flat = self._shared.address(self._slot[every], addresses, 16, instruction.text)
        lanes = slice(None, 8 * len(registers))
        threads = self._thread[every].reshape(-1, WARP)[:, lanes].reshape(-1)
        return registers, flat.reshape(-1, WARP)[:, lanes].reshape(-1), threads

    def _load_matrices(self, instruction: Instruction, index: Array | None) -> None:
        """Lane 4r + w gets word w of row r of each matrix."""
        target, place = instruction.operands
        registers, addresses, threads = self._matrices(instruction, target, place, index)
        words = self._shared.load(addresses, 4, 4, threads, instruction.text)
        rows = np.stack(words, axis=1).reshape(-1, len(registers), WARP)
        if "trans" in instruction.parts:
            rows = _transposed(rows)
        for matrix, register in enumerate(registers):
            self._write(register, "b32", rows[:, matrix].reshape(-1), index)

    def _store_matrices(self, instruction: Instruction, index: Array | None) -> None:
        """Lane 4r + w has word w of row r of each matrix."""
        place, source = instruction.operands
        registers, addresses, threads = self._matrices(instruction, source, place, index)
        count = self._count(index)
        held = [np.broadcast_to(self._read(x, "b32", index), count) for x in registers]
        rows = np.stack([x.reshape(-1, WARP) for x in held], axis=1)
        if "trans" in instruction.parts:
            rows = _transposed(rows)
        self._shared.store(addresses, list(rows.reshape(-1, 4).T), threads, instruction.text)

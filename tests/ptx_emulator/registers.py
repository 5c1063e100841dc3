"""The registers of the threads that run together, one row of values per register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from tests.ptx_emulator.arithmetic import Array, from_bits, numpy_type
from tests.ptx_emulator.parse import Immediate, Name, Operand, Register, Vector

# Bytes of the registers of each bank.
WIDTHS = {"p": 1, "rs": 2, "r": 4, "rd": 8}


@cache
def _view_type(bank: str, kind: str) -> str:
    """Return the numpy type under which a register is read as a PTX type."""
    dtype = np.dtype(numpy_type(kind))
    if dtype.itemsize != WIDTHS[bank]:
        raise NotImplementedError(f"a register of {8 * WIDTHS[bank]} bits is used as {kind}")
    return dtype.str


class Registers:
    """Registers of `count` threads. `index` says which threads, None all of them."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        count: int,
        special: Mapping[str, Array | Callable[[], Array]],
        random: np.random.Generator,
    ) -> None:
        """Fill the registers with garbage, as those that nothing was written to.

        Args:
            sizes: How many registers each bank has.
            count: How many threads there are.
            special: Values of the special registers and symbols, by name, for each thread; of
                those that change a function that returns them.
            random: Where the garbage comes from.
        """
        self.count = count
        self._special = special
        self._banks: dict[str, Array] = {}
        self._views: dict[tuple[str, str], Array] = {}
        for bank, size in sizes.items():
            garbage = np.frombuffer(random.bytes(64 * WIDTHS[bank]), np.uint8)
            total = size * count * WIDTHS[bank]
            again = -(-total // len(garbage))
            values = np.broadcast_to(garbage, (again, len(garbage))).reshape(-1)[:total]
            dtype = np.dtype(f"u{WIDTHS[bank]}") if bank != "p" else np.dtype(bool)
            typed = (values & 1).astype(bool) if bank == "p" else values.view(dtype)
            self._banks[bank] = typed.reshape(size, count)

    def _row(self, register: Register, kind: str) -> Array:
        view = self._views.get((register.bank, kind))
        if view is None:
            view = self._banks[register.bank].view(_view_type(register.bank, kind))
            self._views[register.bank, kind] = view
        row: Array = view[register.number]
        return row

    def size(self, index: Array | None) -> int:
        """Return how many threads `index` stands for."""
        return self.count if index is None else len(index)

    def read(self, operand: Operand, kind: str, index: Array | None) -> Array:
        """Return an operand's values as a PTX type; one value for all where it is a literal."""
        if isinstance(operand, Register):
            row = self._row(operand, kind)
            return row if index is None else row[index]
        if isinstance(operand, Immediate):
            return from_bits(kind, operand.bits)
        if isinstance(operand, Name) and operand.text in self._special:
            held = self._special[operand.text]
            values = (held() if callable(held) else held).astype(numpy_type(kind))
            return values if index is None else values[index]
        raise NotImplementedError(f"{operand} has no value")

    def read_each(self, operand: Operand, kind: str, index: Array | None) -> Array:
        """Return an operand's value of each thread."""
        values = self.read(operand, kind, index)
        return values if values.ndim else np.broadcast_to(values, self.size(index))

    def write(self, operand: Operand, kind: str, values: Array, index: Array | None) -> None:
        """Set a register; `_` takes a value and drops it."""
        if isinstance(operand, Register):
            self._row(operand, kind)[slice(None) if index is None else index] = values
        elif operand != Name("_"):
            raise NotImplementedError(f"{operand} is no register")

    def write_extended(
        self, operand: Operand, kind: str, values: Array, index: Array | None
    ) -> None:
        """Set a register to what was loaded, extended to the register's width."""
        if isinstance(operand, Register) and WIDTHS[operand.bank] > values.dtype.itemsize:
            if kind[0] not in "bus":
                raise NotImplementedError(f"{kind} is loaded into a wider register")
            kind = f"{kind[0]}{8 * WIDTHS[operand.bank]}"
            values = values.astype(numpy_type(kind))
        self.write(operand, kind, values, index)

    def split(self, target: Vector, source: Operand, kind: str, index: Array | None) -> None:
        """Set several registers to the parts of one value, the lowest bits first."""
        width = np.dtype(numpy_type(kind)).itemsize // len(target.parts)
        whole = np.ascontiguousarray(self.read_each(source, kind, index))
        parts = whole.view(f"u{width}").reshape(-1, len(target.parts))
        for k, part in enumerate(target.parts):
            self.write(part, f"b{8 * width}", parts[:, k], index)

    def join(self, target: Operand, source: Vector, kind: str, index: Array | None) -> None:
        """Set one register to the values of several, the lowest bits first."""
        whole = np.dtype(numpy_type(kind))
        width = whole.itemsize // len(source.parts)
        parts = [self.read_each(part, f"b{8 * width}", index) for part in source.parts]
        joined = np.ascontiguousarray(np.stack(parts, axis=1)).view(whole).reshape(-1)
        self.write(target, kind, joined, index)

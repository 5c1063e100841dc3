"""The operators of a reduction, but for Adasum, which is in the adasum package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from collectives._own_packages import require_ours

if TYPE_CHECKING:
    from kernels.gpu.node_kernels import Node

__all__ = ["Average", "Max", "Min", "Operands", "Piece", "Product", "Reducer", "Sum"]

kernels = require_ours("kernels")

_SMALL_BYTES = 64 * 1024
_RING_BYTES = 4 * 1024 * 1024
# Up to this size latency decides: log2 n exchanges of the whole vector (rd), or none in shared
# memory, are faster than an exchange of slices.
_SMALL_TREE_BYTES = 256 * 1024
TREE_RANKS = range(3, 17)
"""How many ranks' operands meet at once with a tree, by `auto` and in a reduce_scatter: two are one
pair, and the tables of more than these have more numbers than are worth it."""


class Piece(NamedTuple):
    """The same elements of two or more vectors.

    Attributes:
        parts: 1-D tensors of equal length, in the order of the reduction; of an operator that needs
            all operands, those of all ranks in rank order.
        out: Where the result goes: one of them, or other memory.
        start: Where they begin in the whole buffer, in elements.
    """

    parts: tuple[torch.Tensor, ...]
    out: torch.Tensor
    start: int


@dataclass(frozen=True)
class Operands:
    """All that one rank reduces in a step.

    Attributes:
        pieces: The parts of the vectors that this rank holds. They may still be arriving, one after
            the other: reading a piece from the sequence waits for it, so work on the first overlaps
            the transfer of the second.
        numel: Length of the whole buffer.
        segments: Element boundaries (0, ..., numel) over the whole buffer; None for one segment.
        sum_partials: Sums a float64 tensor in place over the ranks that together hold both vectors.
            All get the same bits, and all must call it equally often. None where this rank holds
            the vectors by itself, in one piece or in several.
        leaves: How many ranks stand behind each part of every piece, in the order of the parts;
            empty where equally many do.
        tree: How more than two parts are joined, for a reducer that reads trees; empty: from the
            left. (left, right, p, q), by index into the parts of a piece, puts what `left` and
            `right` make in the place of `left`; p and q ranks stand behind both. The last one's
            `left` is the result.
        gather_partials: With a tree: takes this rank's float64 table, returns all ranks' that
            together hold the vectors, [ranks, ...] in ascending order; of many ranks fewer tables,
            each a sum of `Reducer.add_tables`. All that hold the same vectors get the same bits,
            and all must call it equally often with tables of one shape. None where this rank holds
            the vectors by itself.
    """

    pieces: Sequence[Piece]
    numel: int
    segments: Sequence[int] | None
    sum_partials: Callable[[torch.Tensor], None] | None
    leaves: Sequence[int] = ()
    tree: Sequence[tuple[int, int, int, int]] = ()
    gather_partials: Callable[[torch.Tensor], torch.Tensor] | None = None


class Reducer:
    """An operator on buffers: a binary one, in any order or in that of a tree, or one of all ranks.

    One rank's operand alone is its own result: `reduce` is not called for it.

    Attributes:
        name: How errors and traces call it; ranks whose operators have other names make other
            calls, so it names the settings, too.
        operands: What `reduce` is given. "pair": two operands or more, which may be results of
            earlier reductions. "all": those of all ranks at once, as a trimmed mean needs them. An
            algorithm can carry such an operator where its record says `all_at_once`.
        needs_one_tree: Whether every element of a segment must be reduced by the same expression
            tree, as the result depends on whole segments. An algorithm can carry such an operator
            where its record has an `order`.
        reads_tree: Whether, where it needs one tree, its `reduce` takes more than two parts with
            `Operands.tree`. An algorithm can hand it such operands where its record is `by_tree`.
        ordered: Whether every element must be the balanced tree over all ranks. Of all ranks'
            operands at once `reduce` then makes that tree by itself, element by element. An
            algorithm can carry such an operator where its record `makes_tree`.
        order_options: What ranks compare of that order, beside the operator's name.
        averages: Whether equal operands on all ranks give that operand, as an average does and a
            sum does not; None where nobody has said so. Training asks: a difference of parameters
            can be reduced only by what averages.
        replays: Whether all that `reduce` and `finish` do on a GPU is to put work on the current
            stream, the same for the same operands, so that a request may capture it in a CUDA graph
            and call neither again. A class says so for itself: it does not count for subclasses.
        reduces_in_shared_memory: Whether `reduce` needs nothing but the vectors, so that ranks that
            share memory may reduce there without messages: it takes each segment by itself and
            communicates only by calling `sum_partials` once where that is given, with a row for
            each segment, or with a tree `gather_partials`.

    Examples:
        >>> class Largest(collectives.Reducer):
        ...     def check(self, dtype):
        ...         pass  # of every dtype
        ...     def reduce(self, operands):
        ...         for piece in operands.pieces:
        ...             torch.maximum(*piece.parts, out=piece.out)
        >>> def largest(group):
        ...     return group.all_reduce(torch.tensor([1.0, group.rank]), Largest(), algorithm="rd")
        >>> collectives.run_threads(2, largest)
        [tensor([1., 1.]), tensor([1., 1.])]
    """

    name = "Reducer"
    operands: Literal["pair", "all"] = "pair"
    needs_one_tree = False
    reads_tree = False
    ordered = False
    order_options: Mapping[str, Any] = MappingProxyType({})
    averages: bool | None = None
    replays = False
    reduces_in_shared_memory = False

    def __repr__(self) -> str:
        return self.name

    @property
    def associative(self) -> bool:
        """Whether ranks may reduce any part of the operands, in any order, onto any rank."""
        return self.operands == "pair" and not (self.needs_one_tree or self.ordered)

    def check(self, dtype: torch.dtype) -> None:
        """Check that the operator has a meaning on a dtype.

        Raises:
            TypeError: It has none; the text names the dtype.
        """
        raise NotImplementedError

    def reads_tree_of(self, dtype: torch.dtype) -> bool:
        """Return whether it reads trees of operands of this dtype; of others it needs pairs."""
        return self.reads_tree

    def algorithm(self, nbytes: int, size: int) -> str:
        """Return what `auto` stands for with `nbytes` over `size` ranks, by these numbers only.

        It is one range of a specification, of an algorithm that can carry the operator. For plain
        sums, and for operators that read trees and do not override this, `auto` also goes by the
        device (`schedules/auto.py`).
        """
        small = nbytes <= (_SMALL_TREE_BYTES if self.reads_tree else _SMALL_BYTES)
        if self.operands == "all":
            return "bruck" if small else f"psgpu#{size}"
        if self.reads_tree and size in TREE_RANKS:
            return "direct"
        if small:
            return "rd"
        return "vhdd" if self.needs_one_tree else "rechd"

    def reduce(self, operands: Operands) -> None:
        """Write the parts of every piece, reduced, to its `out`, which may be one of them.

        Operands in pairs are joined from the left. Every rank must make the same bits of the same
        operands.
        """
        raise NotImplementedError

    def add_tables(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the sum of float64 tables, [ranks, ...], as `Operands.gather_partials` needs it.

        Only a reducer that reads trees is asked. Every rank must make the same bits of the same.
        """
        return tables.sum(0)

    def bind(self, operands: Operands) -> Callable[[], None]:
        """Return what does `reduce(operands)` any number of times.

        The tensors hold other values each time, all of which have arrived. Unless overridden it
        calls `reduce`. One that is overridden, to plan what repeats, leaves that to `reduce` where
        a subclass has its own, as Adasum's does. The caller lets autograd know what was written.
        """
        return partial(self.reduce, operands)

    def bind_on_node(
        self, node: Node, flat: torch.Tensor, offset: int, segments: Sequence[int] | None
    ) -> Callable[[], None] | None:
        """Return what reduces all ranks' vectors on GPUs that share memory, all of it.

        It puts one launch on the current stream. None, as unless overridden, where there is no such
        kernel: the vectors then go by messages.

        Args:
            node: The memory, and what launches there.
            flat: This rank's vector, [numel], which gets the result.
            offset: Bytes at which it starts in every rank's memory.
            segments: As in `Operands`.
        """
        return None

    def prescale(self, dtype: torch.dtype, size: int) -> float:
        """Return the factor that every rank's buffer is multiplied by before it is reduced."""
        return 1.0

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        """Do what is left on the reduced buffer, element by element; it may come in parts."""


def _dtypes(*names: str) -> frozenset[torch.dtype]:
    """Return those of the dtypes that this torch has."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


# What torch computes with, as tables: to ask torch itself would be an operation that the user's
# modes see, and may make fail. Tests compare them with every dtype that torch has.
_REAL = _dtypes("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")
ORDERED = _REAL | _dtypes("uint8", "bool")
_COMPLEX = _dtypes("complex32", "complex64", "complex128")
ADDED = ORDERED | _COMPLEX
# torch multiplies unsigned integers, and does not add them.
MULTIPLIED = ADDED | _dtypes("uint16", "uint32", "uint64")
# All but those whose elements are smaller than a byte, and quantized ones.
COPIED = MULTIPLIED | _dtypes(
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)


_HALVES = _dtypes("float16", "complex32")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's memory as pairs of reals, any other tensor as it is.

    Times a real factor that torch takes for a complex one infinity has a part that is NaN.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class SumReducer(Reducer):
    """The elementwise sum; each addition rounds to the buffer's dtype, as NCCL's and gloo's do."""

    name = "Sum"
    averages = False
    replays = True
    reduces_in_shared_memory = True

    def check(self, dtype: torch.dtype) -> None:
        if dtype == torch.bool:
            raise TypeError(f"{self.name} has no meaning on {dtype}: convert to an integer dtype")
        if dtype not in ADDED:
            raise TypeError(f"{self.name} needs additions, which torch has not for {dtype}")

    def algorithm(self, nbytes: int, size: int) -> str:
        if nbytes <= _SMALL_BYTES:
            return "rd"
        return "rechd" if nbytes <= _RING_BYTES else "xring"

    def bind_on_node(
        self, node: Node, flat: torch.Tensor, offset: int, segments: Sequence[int] | None
    ) -> Callable[[], None] | None:
        if flat.dtype not in kernels.DTYPES or not is_plain_sum(self):
            return None
        factor = 1.0 / node.size if self.averages else 1.0
        return partial(node.bind_sum(flat, offset), factor)

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            if out.is_complex():
                # torch multiplies the second one by a complex 1, which makes infinity NaN.
                parts, out = tuple(map(as_real, parts)), as_real(out)
            # torch sums integers. On the CPU it also adds two floating-point tensors: the bits are
            # the same, and kernels' checks cost more than a small sum.
            if out.dtype in kernels.DTYPES and (len(parts) > 2 or not out.is_cpu):
                kernels.sum_n(parts, out=out)
            else:
                fold(torch.add, parts, out)


class AverageReducer(SumReducer):
    """The sum divided once, at the end, by the number of ranks n.

    float16, and complex32, is divided by P before the sum, the least power of two not below n, and
    by n/P at the end: the sum of what is finite cannot overflow, but for rounding beside the
    largest values. As long as x/P is a normal number nothing is lost; below, up to log2 P bits of
    x. Complex numbers are divided as pairs of reals.

    Integers are divided exactly and truncated towards zero, as C divides; their sum may overflow.
    """

    name = "Average"
    averages = True
    replays = True

    def prescale(self, dtype: torch.dtype, size: int) -> float:
        return 0.5 ** (size - 1).bit_length() if dtype in _HALVES else 1.0

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        divisor = size * self.prescale(buffer.dtype, size)
        if divisor == 1.0:
            return
        buffer = as_real(buffer)
        if buffer.is_floating_point():
            buffer.div_(divisor)
        else:
            buffer.div_(size, rounding_mode="trunc")


class ElementwiseReducer(Reducer):
    """One of torch's associative functions of two tensors, element by element."""

    replays = True
    reduces_in_shared_memory = True

    def __init__(
        self, name: str, operator: Callable[..., torch.Tensor], dtypes: frozenset[torch.dtype]
    ) -> None:
        self.name = name
        self._operator = operator
        self._dtypes = dtypes

    def check(self, dtype: torch.dtype) -> None:
        if dtype not in self._dtypes:
            raise TypeError(f"{self.name} has no meaning on {dtype}")

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            fold(self._operator, parts, out)


def fold(
    operator: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Write the parts, joined by a binary operator from left to right, to `out`."""
    *first, last = parts
    operator(reduce(operator, first), last, out=out)


def is_plain_sum(op: Reducer) -> bool:
    """Return whether a library's sum can stand for `op`'s reductions, no subclass's."""
    return type(op) in (SumReducer, AverageReducer)


Sum = SumReducer()
Average = AverageReducer()
# A NaN is the Max and the Min of whatever it meets. By Max ranks also compare a call's arguments.
Max = ElementwiseReducer("Max", torch.maximum, ORDERED)
Min = ElementwiseReducer("Min", torch.minimum, ORDERED)
Product = ElementwiseReducer("Product", torch.mul, MULTIPLIED)

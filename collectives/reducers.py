"""The operators of reductions, except Adasum, which is in the adasum package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from collectives._own_packages import require_ours

if TYPE_CHECKING:
    from kernels.gpu.node_kernels import Node

__all__ = ["Average", "Max", "Min", "Needs", "Operands", "Piece", "Product", "Reducer", "Sum"]

kernels = require_ours("kernels")

_SMALL_BYTES = 64 * 1024
_RING_BYTES = 4 * 1024 * 1024
# Up to this size latency decides, and rd's exchanges of whole vectors are faster than slices.
_SMALL_TREE_BYTES = 256 * 1024
TREE_RANKS = range(3, 17)
"""Numbers of ranks whose operands are reduced at once with a tree, by `auto` and in reduce_scatter:
two ranks are one pair, and for more than 16 the tables are too large."""


class Needs(Flag):
    """The needs of an operator, which the algorithm must meet.

    Attributes:
        ANY_ORDER: Only pairs, in any order and on any rank, like a sum.
        ONE_TREE: One expression tree for all elements of each segment, since the result depends on
            whole segments, as with Adasum.
        ALL_OPERANDS: All ranks' operands in one reduction, in rank order, as for a trimmed mean.
        BALANCED_TREE: The balanced tree over all ranks for every element. Given all operands at
            once, the operator's `reduce` itself uses that tree.

    Examples:
        >>> collectives.Needs.ONE_TREE in hvd.Adasum.needs
        True
    """

    ANY_ORDER = 0
    ONE_TREE = auto()
    ALL_OPERANDS = auto()
    BALANCED_TREE = auto()


class Piece(NamedTuple):
    """The same elements of two or more vectors.

    Attributes:
        parts: 1-D tensors of equal length, in the order of the reduction; for an operator that
            needs all operands, one per rank, in rank order.
        out: The tensor for the result: one of the parts, or other memory.
        start: The offset of the piece in the whole buffer, in elements.
    """

    parts: tuple[torch.Tensor, ...]
    out: torch.Tensor
    start: int


@dataclass(frozen=True)
class Operands:
    """The operands of one rank in one step.

    Attributes:
        pieces: The parts of the vectors that this rank holds. They may still be arriving: reading a
            piece from the sequence waits for it, so that work on the first overlaps the transfer
            of the second.
        numel: Length of the whole buffer.
        segments: Element boundaries (0, ..., numel) over the whole buffer; None for one segment.
        sum_partials: Sums a float64 tensor in place over the ranks that together hold both vectors.
            All get the same bits, and all must call it the same number of times. None if this rank
            holds the vectors by itself, in one piece or in several.
        leaves: The numbers of ranks that each part combines, in the order of the parts; empty if
            they are equal.
        tree: The joins of more than two parts, for a reducer that reads trees; empty: from the
            left. Each join (left, right, p, q), by index into a piece's parts, replaces part `left`
            by the reduction of both parts, which combine p and q ranks. The last join's `left` is
            the result.
        gather_partials: With a tree: a function of this rank's float64 table, which returns the
            tables of all ranks that together hold the vectors, [ranks, ...] in ascending order. All
            must call it the same number of times, with tables of one shape. None if this rank holds
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
    """An operator on buffers. With one rank `reduce` is not called: the operand is the result.

    Attributes:
        name: The name in errors and traces. Ranks compare it, so it must include the settings.
        needs: The needs that an algorithm must meet; other algorithms raise ValueError.
        reads_tree: Whether `reduce` supports more than two parts with `Operands.tree`, if it needs
            one tree.
        order_options: Options of its order that ranks compare, in addition to its name.
        averages: Whether equal operands on all ranks give that operand, as with an average, but not
            with a sum; None if unknown. Training depends on it: differences of parameters can only
            be reduced by an operator that averages.
        replays: Whether on a GPU `reduce` and `finish` only put work on the current stream, the
            same for the same operands, so that a request may capture it in a CUDA graph and call
            neither again. Subclasses do not inherit it: each must declare it.
        reduces_in_shared_memory: Whether `reduce` needs only the vectors, so that ranks that share
            memory may reduce there without messages: it handles each segment by itself and only
            communicates by one call of `sum_partials`, if given, with one row per segment, or with
            a tree by `gather_partials`.

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
    needs = Needs.ANY_ORDER
    reads_tree = False
    order_options: Mapping[str, Any] = MappingProxyType({})
    averages: bool | None = None
    replays = False
    reduces_in_shared_memory = False

    def __repr__(self) -> str:
        return self.name

    @property
    def ordered(self) -> bool:
        """Whether every element must be reduced by the balanced tree over all ranks."""
        return self.needs is not Needs.ANY_ORDER and Needs.BALANCED_TREE in self.needs

    @property
    def associative(self) -> bool:
        """Whether any part of the operands may be reduced in any order, on any rank."""
        return self.needs is Needs.ANY_ORDER

    def check(self, dtype: torch.dtype) -> None:
        """Check that the operator supports a dtype.

        Raises:
            TypeError: It does not; the error names the dtype.
        """
        raise NotImplementedError

    def reads_tree_of(self, dtype: torch.dtype) -> bool:
        """Return whether it reads trees of operands of this dtype; for others it needs pairs."""
        return self.reads_tree

    def algorithm(self, nbytes: int, size: int) -> str:
        """Return the algorithm of `auto` for `nbytes` and `size` ranks, by these numbers only.

        It is one range of a specification, with an algorithm that can carry the operator. For plain
        sums, and for operators that read trees and do not override this, `auto` also depends on the
        device (`schedules/auto.py`).
        """
        small = nbytes <= (_SMALL_TREE_BYTES if self.reads_tree else _SMALL_BYTES)
        if Needs.ALL_OPERANDS in self.needs:
            return "bruck" if small else f"psgpu#{size}"
        if self.reads_tree and size in TREE_RANKS:
            return "direct"
        if small:
            return "rd"
        return "vhdd" if Needs.ONE_TREE in self.needs else "rechd"

    def reduce(self, operands: Operands) -> None:
        """Reduce the parts of every piece to its `out`, which may be one of them.

        Without a tree, join the parts from the left. Equal operands must give equal bits on all
        ranks.
        """
        raise NotImplementedError

    def bind(self, operands: Operands) -> Callable[[], None]:
        """Return a function that does `reduce(operands)` any number of times.

        The values differ each time, and all tensors have arrived. By default it calls `reduce`.
        An override that plans the work must fall back to `reduce` if a subclass overrides that, as
        Adasum's does. The caller tells autograd of the written tensors.
        """
        return partial(self.reduce, operands)

    def runs_on_node(self, dtype: torch.dtype, size: int) -> bool:
        """Return whether `bind_on_node` has a kernel for this dtype and number of ranks per node.

        With several nodes, `reduce` joins the nodes' results, slice by slice.
        """
        return False

    def bind_on_node(
        self, node: Node, flat: torch.Tensor, offset: int, segments: Sequence[int] | None
    ) -> Callable[[], None]:
        """Return a function that reduces all ranks' vectors on GPUs that share memory, in full.

        It puts one launch on the current stream.

        Args:
            node: The memory, and its launches.
            flat: This rank's vector, [numel], also for the result; with several nodes only this
                rank's slice (`node.slice`) gets the node's result.
            offset: Its offset in bytes in every rank's memory.
            segments: As in `Operands`.
        """
        raise NotImplementedError

    def prescale(self, dtype: torch.dtype, size: int) -> float:
        """Return the factor to multiply every rank's buffer by, before the reduction."""
        return 1.0

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        """Finish the reduced buffer, element by element; it may come in parts."""


def _dtypes(*names: str) -> frozenset[torch.dtype]:
    """Return the named dtypes, except ones that this version of torch lacks."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


# Tables, because trying the operation in torch would run it under the user's modes, which may
# refuse it. Tests compare the tables with every dtype of torch.
_REAL = _dtypes("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")
ORDERED = _REAL | _dtypes("uint8", "bool")
_COMPLEX = _dtypes("complex32", "complex64", "complex128")
ADDED = ORDERED | _COMPLEX
# torch multiplies unsigned integers, but does not add them.
MULTIPLIED = ADDED | _dtypes("uint16", "uint32", "uint64")
# All dtypes except quantized ones, and ones with elements smaller than a byte.
COPIED = MULTIPLIED | _dtypes(
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)


# The most ranks of a sum in memory that GPUs share: `kernels.gpu.node_kernels.MAX_RANKS`.
NODE_RANKS = 32
_HALVES = _dtypes("float16", "complex32")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's memory as pairs of reals; any other tensor as it is.

    torch multiplies complex tensors by a real factor as a complex one, which turns infinity into
    NaN.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class SumReducer(Reducer):
    """The elementwise sum; each addition rounds to the buffer's dtype, as in NCCL and gloo."""

    name = "Sum"
    averages = False
    replays = True
    reduces_in_shared_memory = True

    def check(self, dtype: torch.dtype) -> None:
        if dtype == torch.bool:
            raise TypeError(f"{self.name} has no meaning on {dtype}: convert to an integer dtype")
        if dtype not in ADDED:
            raise TypeError(f"{self.name} needs additions, which torch lacks for {dtype}")

    def algorithm(self, nbytes: int, size: int) -> str:
        if nbytes <= _SMALL_BYTES:
            return "rd"
        return "rechd" if nbytes <= _RING_BYTES else "xring"

    def runs_on_node(self, dtype: torch.dtype, size: int) -> bool:
        return dtype in kernels.DTYPES and is_plain_sum(self) and size <= NODE_RANKS

    def bind_on_node(
        self, node: Node, flat: torch.Tensor, offset: int, segments: Sequence[int] | None
    ) -> Callable[[], None]:
        factor = 1.0 / node.size if self.averages else 1.0
        return partial(node.bind_sum(flat, offset), factor)

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            if out.is_complex():
                # torch multiplies the second tensor by a complex 1, which turns infinity into NaN.
                parts, out = tuple(map(as_real, parts)), as_real(out)
            # torch adds integers, and two tensors on the CPU: the bits are the same, and the
            # kernels' checks cost more than a small sum.
            if out.dtype in kernels.DTYPES and (len(parts) > 2 or not out.is_cpu):
                kernels.sum_n(parts, out=out)
            elif len(parts) == 2:
                torch.add(parts[0], parts[1], out=out)
            else:
                fold(torch.add, parts, out)


class AverageReducer(SumReducer):
    """The sum divided once, at the end, by the number of ranks n.

    float16 and complex32 are divided by P before the sum, the smallest power of two >= n, and by
    n/P at the end, so that the sum of finite numbers cannot overflow, except by rounding near the
    largest number. Nothing is lost while x/P is a normal number; below, up to log2 P bits of x.

    Integers are divided exactly and truncated towards zero, as in C; their sum may overflow.
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
    """Join the parts by a binary operator from left to right, into `out`."""
    *first, last = parts
    operator(reduce(operator, first), last, out=out)


def is_plain_sum(op: Reducer) -> bool:
    """Return whether a library's sum can replace `op`: it is Sum or Average, not a subclass."""
    return type(op) in (SumReducer, AverageReducer)


Sum = SumReducer()
Average = AverageReducer()
# The Max or Min of NaN and anything is NaN.
Max = ElementwiseReducer("Max", torch.maximum, ORDERED)
Min = ElementwiseReducer("Min", torch.minimum, ORDERED)
Product = ElementwiseReducer("Product", torch.mul, MULTIPLIED)

AnyReducer: TypeAlias = "Reducer | dist.ReduceOp | dist.ReduceOp.RedOpType"
"""The type of arguments `op`: a Reducer, or torch's name for one, such as dist.ReduceOp.SUM."""

# Empty if torch has no torch.distributed. mypy confuses the enum's members with its instances.
_Op: Any = dist.ReduceOp.RedOpType if dist.is_available() else None
TORCH_REDUCERS: dict[Any, Reducer] = (
    {_Op.SUM: Sum, _Op.AVG: Average, _Op.MIN: Min, _Op.MAX: Max, _Op.PRODUCT: Product}
    if dist.is_available()
    else {}
)


def from_torch(argument: str, op: Any) -> Any:
    """Return the Reducer for a torch.distributed.ReduceOp; any other object as it is.

    Raises:
        TypeError: There is no Reducer for it; `argument` is its name in the error.
    """
    if not TORCH_REDUCERS or not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    kind: Any = getattr(op, "op", op)
    if kind not in TORCH_REDUCERS:
        raise TypeError(
            f"{argument} must be a Reducer such as collectives.Sum, or SUM, AVG, MIN, MAX or "
            f"PRODUCT of torch.distributed.ReduceOp, got {kind.name}"
        )
    return TORCH_REDUCERS[kind]

"""A function's checked arguments, the input of plans, operators and both backends."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.layout import Layout
from kernels.validation import DTYPES, check_scalar

FUNCTIONS = (
    *("pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"),
    *("gram", "adasum_coefficients", "weighted_sum"),
)
# Functions that are linear in their tensors: these have derivatives.
LINEAR = FUNCTIONS[:4]
# How many scalars a function has.
SCALARS = {"pack": 1, "unpack": 1, "sum_n": 1, "scaled_add": 2, "combine": 2, "adasum": 2}
# The orders of `sum_n`.
ORDERS = ("list", "tree")
# Functions of a list of tensors that are equal in shape and dtype.
_OF_EQUALS = ("sum_n", "gram", "weighted_sum")
# Marks tensors whose addresses are yet to be read. No array: dynamo cannot take one along.
UNREAD: Any = ()


Tree = tuple[tuple[int, int, float, float], ...]


@dataclass
class Call:
    """A function's checked arguments, the input of plans, operators and both backends.

    kernels/cpu/calls.h passes the first of these in this order.

    Attributes:
        function: The function's name.
        inputs: The tensors to read; `unpack` writes them.
        out: The tensor to write; `unpack` reads it, since it is the buffer.
        place: The boundaries of segments, None for one segment; for packed buffers the layout.
        made: Whether `out` was made for this call.
        addresses: The inputs' addresses as uint64, once they and the memory of all tensors are
            checked; empty before.
        aligned: Whether these and the address of `out` are multiples of 16, the bytes of the widest
            access.
        codes: The numbers of the inputs' dtypes in `DTYPES`, for packed buffers or if C has checked
            the call.
        found_inf: An output, set to 1 if a value written is Inf or NaN; None if not wanted.
        table: The dots of `combine`, the coefficients of `weighted_sum`.
        kind: The order of `sum_n`, "list" or "tree"; whether the matrices are precise for `gram`;
            whether one cooperative launch is allowed for `adasum`.
        accumulate: For `sum_n`, the dtype to which each addition is rounded; None for the dtype of
            the computation.
        spread: For `adasum_coefficients`, an output: how far vectors cancel.
        tree: For `adasum_coefficients`, the rows (left, right, p, q).
        rebound: Whether the tensors come from `Plan.rebind`, as its `tensors` and `out`.
        planned: Whether it is the first binding of a plan.
    """

    function: str
    inputs: list[Tensor]
    out: Tensor
    place: Layout | tuple[int, ...] | None
    made: bool = False
    addresses: array[int] = UNREAD
    aligned: bool = False
    codes: Sequence[int] = b""
    found_inf: Tensor | None = None
    table: Tensor | None = None
    kind: str | bool | None = "list"
    accumulate: torch.dtype | None = None
    spread: Tensor | None = None
    tree: Tree = ()
    rebound: bool = False
    planned: bool = False

    @property
    def layout(self) -> Layout | None:
        """The layout of a packed buffer."""
        return self.place if isinstance(self.place, Layout) else None

    @property
    def bounds(self) -> tuple[int, ...]:
        """The starts of segments in `out` or in the inputs, and the end of the last one.

        Of packed buffers the starts of slots; empty for `adasum_coefficients`.
        """
        if isinstance(self.place, Layout):
            return self.place.segments
        return (0, self.inputs[0].numel()) if self.place is None else self.place

    @property
    def out_name(self) -> str:
        """The name of `out` in error texts."""
        return "buffer" if self.function == "unpack" and not self.rebound else "out"

    def name(self, i: int) -> str:
        """Return the name of an input in error texts."""
        if self.rebound or self.layout is not None or self.function in _OF_EQUALS:
            return f"tensors[{i}]"
        return "partials" if self.function == "adasum_coefficients" else "ab"[i]

    def others(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of all arguments except the inputs."""
        named = [(self.out_name, self.out)]
        if self.found_inf is not None:
            named.insert(0, ("found_inf", self.found_inf))
        if self.table is not None:
            named.append(("dots" if self.function == "combine" else "coefficients", self.table))
        if self.spread is not None:
            named.append(("spread", self.spread))
        return named

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The inputs' dtypes."""
        if self.codes:
            return [DTYPES[code] for code in self.codes]
        return [one.dtype for one in self.inputs]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The inputs' shapes, which are equal unless the inputs are packed."""
        if self.layout is not None:
            return list(self.layout.shapes)
        return [self.inputs[0].shape] * len(self.inputs)

    @property
    def packing(self) -> bool:
        """Whether it writes into a packed buffer."""
        return self.function == "pack"

    @property
    def accumulated(self) -> torch.dtype:
        """For `sum_n`, the dtype to which each addition is rounded."""
        return self.accumulate or compute_dtype(self.inputs[0].dtype, self.out.dtype)

    @property
    def precise(self) -> bool:
        """For `gram` and `adasum_coefficients`, whether the matrices are double-double."""
        if self.function == "gram":
            return self.out.dim() == 4
        return self.function == "adasum_coefficients" and self.inputs[0].dim() == 5

    @property
    def in_place(self) -> bool:
        """Whether `out` may be one of the inputs, since it is computed element by element."""
        return self.layout is None and self.function not in ("gram", "adasum_coefficients")

    @property
    def result(self) -> Any:
        """The tensors that it returns: a list for `unpack`, otherwise `out`."""
        return self.inputs if self.function == "unpack" else self.out

    @property
    def written(self) -> list[Tensor]:
        """The tensors that it writes."""
        main = self.inputs if self.function == "unpack" else [self.out]
        if self.found_inf is None and self.spread is None:
            return main
        return [*main, *[one for one in (self.found_inf, self.spread) if one is not None]]


def check_tree(tree: object, count: int) -> Tree:
    """Return as a tuple the rows (left, right, p, q) that join `count` vectors into one.

    Raises TypeError if `tree` is not a sequence of such rows, and ValueError if they do not join
    all vectors, each once, or if a weight is not positive and finite.
    """
    if isinstance(tree, (str, Tensor)) or not isinstance(tree, Sequence):
        raise TypeError(f"tree must be a list or tuple of rows, got {type(tree).__name__}")
    standing, rows, left = set(range(count)), [], 0
    for i, row in enumerate(tree):
        if not isinstance(row, (tuple, list)) or len(row) != 4:
            raise TypeError(f"tree[{i}] must be four numbers (left, right, p, q), got {row!r}")
        left, right = row[:2]
        p, q = (check_scalar(f"tree[{i}][{at}]", row[at]) for at in (2, 3))
        for one in (left, right):
            if type(one) is not int:
                raise TypeError(f"tree[{i}] must name vectors by ints, got {type(one).__name__}")
            if one not in standing:
                raise ValueError(
                    f"tree[{i}] joins vector {one}, which is not one of the {count}, or was joined "
                    "to another before"
                )
        if left == right:
            raise ValueError(f"tree[{i}] joins vector {left} to itself")
        if not (p > 0.0 and q > 0.0 and p + q < math.inf):
            raise ValueError(f"tree[{i}] has weights {(p, q)}: pass positive and finite ones")
        standing.remove(right)
        rows.append((left, right, p, q))
    if standing != {left}:
        raise ValueError(
            f"tree must join {count} vectors into one by {count - 1} rows, of which the last row's "
            f"left vector is the result, got {len(rows)} rows"
        )
    return tuple(rows)

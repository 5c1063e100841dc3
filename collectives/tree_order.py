"""Sum and Average that reduce every element by one tree over the ranks, with any algorithm.

The tree is balanced, ((0 · 1) · (2 · 3)) · ...: `Order.BALANCED`. Without it the bits of elements
may depend on their place in the buffer, on the buffer's size and on the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from collectives import validation
from collectives.reducers import (
    AverageReducer,
    Needs,
    Operands,
    Reducer,
    SumReducer,
    as_real,
    fold,
    kernels,
)

KEYS = frozenset({"order", "accumulate", "passes"})
"""The names of the options for a call's order."""

# Up to this size latency decides.
_SMALL_BYTES = 256 * 1024


class _TreeSum(SumReducer):
    """The sum by the balanced tree, each addition rounded to the buffer's dtype.

    accumulate: the dtype of additions, float32, so that only the result is rounded to the buffer's
    dtype; None for the buffer's dtype; passes: the number of the tree's leaves that each rank has
    already added, by the same tree.
    """

    replays = True

    def __init__(self, accumulate: torch.dtype | None = None, passes: int = 1) -> None:
        self.accumulate = accumulate
        self.passes = passes
        self.needs = Needs.BALANCED_TREE
        if accumulate is not None:
            # Rounding once, at the end, needs all operands at once.
            self.needs |= Needs.ALL_OPERANDS
        said = None if accumulate is None else str(accumulate)
        self.order_options = {"order": "tree", "accumulate": said, "passes": passes}

    def check(self, dtype: torch.dtype) -> None:
        super().check(dtype)
        if self.accumulate is None:
            return
        real = dtype.to_real() if dtype.is_complex else dtype
        if not real.is_floating_point or real.itemsize > self.accumulate.itemsize:
            raise TypeError(
                f"accumulate={self.accumulate} is for float16, bfloat16 and float32, got {dtype}: "
                "leave it out"
            )

    def algorithm(self, nbytes: int, size: int) -> str:
        if nbytes > _SMALL_BYTES:
            return "direct"
        return "oneshot" if self.accumulate is not None else "rd"

    def prescale(self, dtype: torch.dtype, size: int) -> float:
        # The factor would depend on the number of ranks.
        return 1.0

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            if not (out.is_floating_point() or out.is_complex()):
                # Sums of integers do not depend on the order.
                fold(torch.add, parts, out)
                continue
            parts, out = tuple(map(as_real, parts)), as_real(out)
            if len(parts) == 2 and out.is_cpu and parts[0].dtype == out.dtype:
                # The bits are the same, and the kernels' checks cost more than a small sum.
                torch.add(*parts, out=out)
            else:
                accumulate = self.accumulate or out.dtype
                kernels.sum_n(parts, out=out, order="tree", accumulate=accumulate)


class _TreeAverage(_TreeSum, AverageReducer):
    """The same sum, divided once at the end by ranks times passes.

    float16 is not divided before the sum, which overflows beyond 65504 unless accumulated.
    """

    replays = True

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        """Divide by the number of the tree's leaves."""
        super().finish(buffer, size * self.passes)


_KINDS: dict[type[Reducer], Callable[..., _TreeSum]] = {
    SumReducer: _TreeSum,
    AverageReducer: _TreeAverage,
}
_DTYPES = {None: None, torch.float32: torch.float32, str(torch.float32): torch.float32}


def in_order(
    op: Reducer,
    order: str | None = None,
    accumulate: torch.dtype | str | None = None,
    passes: int = 1,
) -> Reducer:
    """Return the version of `op` with this order; `op` itself without one.

    Args:
        op: Sum or Average, if there is an order.
        order: "tree" or None.
        accumulate: The dtype of the additions: torch.float32, or its name.
        passes: The number of leaves that each rank has already added.
    """
    if order is None:
        if accumulate is not None:
            raise ValueError("accumulate is for order='tree': pass both, or neither")
        return op
    validation.instance("order", order, str, "'tree' or None")
    if order != "tree":
        raise ValueError(f"order must be 'tree' or None, got {order!r}")
    if isinstance(op, _TreeSum):
        raise ValueError("op has an order already: leave out order")
    kind = _KINDS.get(type(op))
    if kind is None:
        raise ValueError(f"order='tree' is for Sum and Average, not for {op!r}: leave it out")
    if not isinstance(accumulate, str | torch.dtype | None) or accumulate not in _DTYPES:
        raise ValueError(
            f"accumulate must be torch.float32, or None for the tensors' own dtype, got "
            f"{accumulate!r}"
        )
    return _made(kind, _DTYPES[accumulate], passes)


# One object per kind, as with Sum and Average, since requests are kept by operator.
@lru_cache(maxsize=256)
def _made(kind: Callable[..., _TreeSum], accumulate: torch.dtype | None, passes: int) -> Reducer:
    return kind(accumulate, passes)

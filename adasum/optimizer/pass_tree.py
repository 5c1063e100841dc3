"""Sums of backward passes by the balanced tree: the part of order="tree" within each rank.

The leaves of the tree are the passes of all ranks, rank by rank. If each rank has 2^m of them, they
form a subtree: 8 ranks with one pass, 4 with 2, 2 with 4 and 1 with 8 get the same sum, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from collectives.modes import outside_modes
from collectives.reducers import as_real


def require_passes(passes: int, size: int) -> None:
    """Raise ValueError unless the passes of each rank form a subtree of the whole tree."""
    if size > 1 and passes & (passes - 1):
        raise ValueError(
            f"backward_passes_per_step={passes} on {size} ranks cuts the tree of order='tree': "
            "pass 1, 2, 4, 8, ..., whose sums are parts of it; a single rank takes any number"
        )


class PassTree:
    """Adds each parameter's gradients over a step's backward passes.

    Between two passes parameters have no gradients: the sums are kept here, for each parameter at
    most as many as the tree has levels. A pass that does not reach a parameter counts as zeros.

    Args:
        divides: Whether to divide by the passes here: for Average, if this rank reduces with no
            others.

    Attributes:
        ended: The number of the step's backward passes that have ended.
    """

    def __init__(self, *, divides: bool) -> None:
        self._divides = divides
        # By parameter and level, the sum that waits for its right neighbour in the tree. Level 0
        # has the leaves that pair first if the passes are not a power of two.
        self._waiting: dict[Tensor, dict[int, Tensor]] = {}
        self.ended = 0

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of earlier passes are kept for the coming step."""
        return bool(self._waiting)

    def restart(self) -> None:
        """Begin a new step."""
        self._waiting.clear()
        self.ended = 0

    @outside_modes()
    @torch.no_grad()
    def end_pass(self, parameters: Iterable[Tensor], passes: int) -> None:
        """Add the gradients of a pass that has ended, unless it is the last one of `passes`."""
        if self.ended + 1 < passes:
            for parameter in parameters:
                gradient, parameter.grad = parameter.grad, None
                self._put(parameter, gradient, passes)
        self.ended += 1

    @outside_modes()
    @torch.no_grad()
    def finish(self, parameters: Iterable[Tensor], passes: int) -> None:
        """Set each gradient, which is the last pass's, to the sum over all passes."""
        for parameter in parameters:
            if parameter in self._waiting:
                self._put(parameter, parameter.grad, passes)
                total = None
                # After fewer passes than planned, sums still wait; missing passes are zeros.
                for _, left in sorted(self._waiting.pop(parameter).items()):
                    total = _add(left, total)
                parameter.grad = total
            if self._divides and parameter.grad is not None:
                as_real(parameter.grad).div_(passes)

    def _put(self, parameter: Tensor, gradient: Tensor | None, passes: int) -> None:
        """Add the gradient of the pass that is ending; None stands for zeros."""
        if gradient is None and parameter not in self._waiting:
            return
        waiting = self._waiting.setdefault(parameter, {})
        level, place = _place(min(self.ended, passes - 1), passes)
        # Like carries in a binary counter.
        while place & 1:
            gradient = _add(waiting.pop(level, None), gradient)
            level, place = level + 1, place >> 1
        if gradient is not None:
            waiting[level] = gradient


def _place(leaf: int, passes: int) -> tuple[int, int]:
    """Return a leaf's level in the balanced tree, and its place among that level's nodes."""
    extra = passes - (1 << (passes.bit_length() - 1))
    return (0, leaf) if leaf < 2 * extra else (1, leaf - extra)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right

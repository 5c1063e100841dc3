"""Gradients that overflow on one rank, made to be seen by GradScaler on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adasum.optimizer.packed_gradients import dtype_of_gradient


class SharedOverflow:
    """Puts a NaN into a gradient of this rank's where any rank's is not finite, until `undo`.

    GradScaler looks at this rank's gradients alone, and its next scale must be the same on all
    ranks. Where this rank has no gradient, `substitute` is a parameter of another rank that has one
    of zeros meanwhile: GradScaler wants to see one on every rank. Nothing here waits for a GPU.
    """

    def __init__(self) -> None:
        self.substitute: Tensor | None = None
        # A gradient, whose memory is nobody else's while it is here, an element of it, its value,
        # and whether NaN has taken its place.
        self._overwritten: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def share(self, overflowed: Tensor, mine: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Let GradScaler see on this rank whether any rank's gradients overflow.

        `overflowed` says so, `mine` are the parameters whose gradients this rank has, `others`
        those whose gradients other ranks have.
        """
        usable = [each.grad for each in mine if each.grad is not None and _is_writable(each.grad)]
        if not usable and others:
            self.substitute = max(others, key=lambda each: bool(each.numel()))
            dtype = dtype_of_gradient(self.substitute)
            self.substitute.grad = zeros = torch.zeros_like(self.substitute, dtype=dtype)
            usable = [zeros] if _is_writable(zeros) else []
        if usable:
            # By way of `data`, since what torch counts as a change of a gradient is the user's.
            element = usable[0].data[(0,) * usable[0].dim()]
            overflowed = overflowed.to(element.device)
            self._overwritten = usable[0], element, element.clone(), overflowed
            element.masked_fill_(overflowed, float("nan"))

    def keep(self) -> None:
        """Leave the element as it is: there was no NaN, and GradScaler has unscaled it since."""
        self._overwritten = None

    @torch.no_grad()
    def undo(self) -> None:
        """Give the gradient its element back, and drop the substitute's gradient."""
        if self._overwritten is not None:
            _, element, value, overflowed = self._overwritten
            # What was not overwritten may have been clipped since.
            element.copy_(torch.where(overflowed, value, element))
        if self.substitute is not None:
            self.substitute.grad = None
        self.substitute = self._overwritten = None


def _is_writable(gradient: Tensor) -> bool:
    """Return whether an element can be overwritten: one that autograd records must not be."""
    return gradient.layout is torch.strided and gradient.numel() > 0 and not gradient.requires_grad

"""What happens to a gradient between backward and step: a record a parameter, a table of states.

A parameter's record counts the backward passes that have reached it since the last `restart`, and
is in one of four states. Every hook and every call of the optimizer is a row of this table:

=====================  ==============  ===============  ====================  =============
event                  waiting         complete         under way             reduced
=====================  ==============  ===============  ====================  =============
a backward adds to     one pass more,  error: too many  error: too late       error: too
the gradient (hook)    at `passes`     passes                                 late
                       complete
its bucket's turn: it  -               packed, with     -                     -
and all before it are                  its bucket:
complete (hook)                        under way
backward ends          -               -                awaited; unpacked     -
                                                        to p.grad: reduced
synchronize(), step()  packed as it    packed           awaited; an error if  -
without it             is, a missing                    p.grad was changed;
                       one as zeros                     unpacked: reduced
zero_grad()            as synchronize() if another rank's backward may wait for this one's
                       gradients; then waiting, with no passes; an error while under way
step() has stepped     waiting, with no passes; what p.grad holds is `left`: without another
                       backward it is not reduced again
=====================  ==============  ===============  ====================  =============

The delta method reduces steps, not gradients: its buckets have their turn in `step()`, or with
step_in_backward as above. A parameter takes part in a step (`active`) if it is trainable, or has
been given a gradient, when a backward of the step begins; what changes later counts from the next
step. Buckets have their turns in one order on every rank.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class State(Enum):
    """Where a parameter's gradient is, of the step that is being made."""

    WAITING = "waiting"
    COMPLETE = "complete"
    UNDER_WAY = "under way"
    REDUCED = "reduced"


WAITING, COMPLETE, UNDER_WAY, REDUCED = State


class Record:
    """What is known of a parameter. It holds no tensor: hooks keep it alive.

    Attributes:
        name: The parameter's.
        bucket: The number of its bucket.
        seen: How many backward passes have reached it since `restart`.
        state: See the table.
        active: Whether it takes part in this step's reduction.
        version: What torch counted of the gradient's changes when it was packed, or left.
        left: The gradient that the last step has left, until a backward reaches the parameter.
        added: Whether backward has added to what was left.
        newer: The hooks of an optimizer made later that has the parameter, too.
        sparse: Whether its last gradient was sparse: (sparse dimensions, dtype), or None.
    """

    __slots__ = (
        *("name", "bucket", "seen", "state", "active", "version", "left", "added", "newer"),
        "sparse",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.bucket = self.seen = 0
        self.state = WAITING
        self.active = self.added = False
        self.version: int | None = None
        self.left: weakref.ref[Tensor] | None = None
        self.newer: weakref.ref[Any] | None = None
        self.sparse: tuple[int, torch.dtype] | None = None

    def is_left(self, gradient: Tensor | None) -> bool:
        """Return whether the gradient is the one that the last step has left, unchanged."""
        if self.left is None or gradient is None or self.left() is not gradient:
            return False
        return self.version is not None and version_of(gradient) == self.version


def version_of(tensor: Tensor) -> int | None:
    """Return a number that every change in place raises; None if torch counts none.

    A view's is that of all that lies in its memory.
    """
    return None if tensor.is_inference() else tensor._version

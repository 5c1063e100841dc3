"""What happens to a gradient between backward and step: a record a parameter, a table of states.

A parameter's record counts the backward passes that have reached it since the last `restart`. That
count and its bucket's turn say in which of four states the gradient is. Every hook and every call
of the optimizer is a row of this table:

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
from typing import Any

import torch
from torch import Tensor


class Record:
    """What is known of a parameter. It holds no tensor: hooks keep it alive.

    Attributes:
        name: The parameter's.
        bucket: The number of its bucket.
        handle: Removes the hook on its gradient.
        seen: How many backward passes have reached it since `restart`.
        active: Whether it takes part in this step's reduction.
        newer: The hooks of an optimizer made later that has the parameter, too.
        had: With mode="owners", whether it had a gradient when its bucket was packed.
        left: The gradient that the last step has left and torch's count of its changes then, until
            a backward reaches it; None for one made in inference mode, of which torch counts none.
        sparse: Whether its last gradient was sparse: (sparse dimensions, dtype), or None.
    """

    __slots__ = (*("name", "bucket", "handle", "seen", "active", "newer", "had", "sparse", "left"),)

    def __init__(self, name: str) -> None:
        self.name = name
        self.bucket = self.seen = 0
        self.active = self.had = False
        self.handle: Any = None
        self.newer: weakref.ref[Any] | None = None
        self.sparse: tuple[int, torch.dtype] | None = None
        self.left: tuple[weakref.ref[Tensor], int] | None = None

    def is_left(self, gradient: Tensor | None) -> bool:
        """Return whether the gradient is the one that the last step has left, unchanged."""
        if self.left is None or gradient is None:
            return False
        left, version = self.left
        return left() is gradient and gradient._version == version

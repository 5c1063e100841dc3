"""The states of a gradient between backward and step, with one record per parameter.

The record counts the backward passes that have reached the parameter since the last `restart`. This
count and the start of its bucket put the gradient in one of four states. Each hook and call of the
optimizer has a row in this table:

=====================  ==============  ===============  ====================  =============
event                  waiting         complete         under way             reduced
=====================  ==============  ===============  ====================  =============
a backward adds to     one pass more,  error: too many  error: too late       error: too
the gradient (hook)    at `passes`     passes                                 late
                       complete
its bucket starts: it  -               packed, with     -                     -
and all before it are                  its bucket:
complete (hook)                        under way
backward ends          -               -                awaited; unpacked     -
                                                        to p.grad: reduced
synchronize(), step()  packed as it    packed           awaited; an error if  -
without it             is; zeros if                     p.grad was changed;
                       missing                          unpacked: reduced
zero_grad()            as synchronize() if another rank's backward may wait for this one's
                       gradients; then waiting, with no passes; an error while under way
step() has ended       waiting, with no passes; p.grad is `left`: without another backward it is
                       not reduced again
=====================  ==============  ===============  ====================  =============

The delta method reduces steps, not gradients: its buckets start in `step()`, or as above with
step_in_backward. Parameters take part in the step (`active`) if they are trainable, or have a
gradient, when one of its backwards begins; later changes count from the next step on. Buckets start
in the same order on every rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Record:
    """The state of one parameter. It holds no tensor, since hooks keep it alive.

    Attributes:
        name: The parameter's name.
        bucket: The number of its bucket.
        handle: Removes the hook on its gradient.
        seen: The number of backward passes that have reached it since `restart`.
        active: Whether it takes part in this step's reduction.
        newer: The hooks of a later optimizer that also has the parameter.
        had: Whether it had a gradient when its bucket was packed.
        left: The gradient that remained after the last step, and torch's count of its changes then;
            None once a backward reaches it, or if it was made in inference mode (no count).
        sparse: (sparse dimensions, dtype) if its last gradient was sparse, or None.
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
        """Return whether the gradient remains, unchanged, from the last step."""
        if self.left is None or gradient is None:
            return False
        left, version = self.left
        return left() is gradient and gradient._version == version

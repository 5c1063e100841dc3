"""Count the backward passes that torch has added to gradients since they were reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from collectives.modes import untraced


class PassCounter:
    """Counts, for each parameter, the passes that its gradient sums.

    Counting begins at the first reduction, which brings the parameters. If anything but backward
    replaces, zeroes or writes to a gradient, its count starts again at 1.
    """

    # Each parameter's gradient (memory, version) after the last pass, and the number of passes.
    _counts: MutableMapping[Tensor, tuple[tuple[int, int] | None, int]]

    def __init__(self) -> None:
        self._counts = WeakIdKeyDictionary()
        self._additions: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []
        self._closed = False

    def take(self, parameters: Sequence[Tensor]) -> int:
        """Return the largest count of the parameters, and reset their counts for a reduction."""
        if self._closed:
            return 0
        most = 0
        for parameter in parameters:
            if parameter in self._counts:
                most = max(most, self._counts[parameter][1])
            elif parameter.requires_grad:
                hook = untraced(self._add)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._counts[parameter] = None, 0
        self._additions.clear()
        return most

    def close(self) -> None:
        """Stop counting."""
        self._closed = True
        for handle in self._handles:
            handle.remove()

    def _add(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        # Views of one bucket share a version, and each pass raises it by one for each view: the
        # rest are other writes. Not public, but torch's own count of writes to a tensor.
        memory = gradient.untyped_storage().data_ptr()
        self._additions[memory] += 1
        now = memory, gradient._version - self._additions[memory]
        before, passes = self._counts[parameter]
        self._counts[parameter] = now, passes + 1 if now == before else 1

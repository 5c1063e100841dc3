"""Small all-reduces that travel with the agreement, where all ranks share a board.

Every rank shows its vector there before it enters the call; once all have entered, each carries out
the whole tree of recursive doubling (`rd`) by itself. The same bits as by messages, and not one.
Each rank reads n vectors and reduces n - 1 times instead of log2 n: cheaper while a message costs
more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .algorithms.folding import Fold
from .executor import Workspace
from .fused import buffer_of
from .reducers import Operands, Piece, Reducer, kernels
from .spec import AllReduceSpec
from .transport.board import WINDOW_BYTES

Tensor = torch.Tensor

# What a rank reads of all windows together, at most.
_MOST_BYTES = 2 * 1024 * 1024


class Exhibit(NamedTuple):
    """What a rank shows in a call: `fill` writes it to a tensor of `numel` elements."""

    numel: int
    dtype: torch.dtype
    fill: Callable[[Tensor], object]


def exhibit_of(tensors: Sequence[Tensor], size: int) -> Exhibit | None:
    """How `size` ranks can show the tensors of an all-reduce; None where they are too large.

    Several tensors are shown as they are packed: of one dtype, each in its slot.
    """
    first = tensors[0]
    room = min(WINDOW_BYTES, _MOST_BYTES // size)
    if not all(t.is_cpu and t.dtype == first.dtype for t in tensors):
        return None
    if not 0 < sum(tensor.nbytes for tensor in tensors) <= room:
        return None
    if len(tensors) == 1:
        flat = first.detach().view(-1)
        return Exhibit(flat.numel(), flat.dtype, lambda window: window.copy_(flat))
    if first.dtype not in kernels.DTYPES:
        return None
    fused = buffer_of(tensors)
    layout = kernels.layout_of(tensors) if fused is None else fused.layout
    if layout.numel * first.element_size() > room:
        return None
    if fused is not None:
        buffer = fused.buffer
        return Exhibit(layout.numel, layout.dtype, lambda window: window.copy_(buffer))
    parts = [tensor.detach() for tensor in tensors]
    return Exhibit(
        layout.numel, layout.dtype, lambda window: kernels.pack(parts, layout=layout, out=window)
    )


def by_doubling(spec: AllReduceSpec, nbytes: int, size: int, op: Reducer, measured: bool) -> bool:
    """Whether a range of a specification stands for `rd` where nothing has to be sent for it.

    measured: whether `auto` may follow what costs least.
    """
    if spec.inner is not None:
        return False
    if spec.outer == "auto":
        return (measured and not op.uniform) or op.algorithm(nbytes, size) == "rd"
    return spec.outer == "rd"


def reduce_shown(
    shown: Sequence[Tensor],
    out: Tensor,
    op: Reducer,
    segments: Sequence[int] | None,
    workspace: Workspace,
) -> None:
    """out = what `rd` makes of all ranks' vectors, which are only read.

    Between them stand buffers aligned alike on every rank, so that all get the same bits.
    """
    fold = Fold(len(shown))
    width = -(-out.nbytes // 64) * 64 // out.element_size()
    depth = fold.leaves.bit_length()
    scratch = workspace.take(width * depth, out)

    def reduce(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
        piece = Piece((left, right), target, 0)
        op.reduce(Operands((piece,), out.numel(), segments, None))
        return target

    def value(leaf: int, leaves: int, level: int) -> Tensor:
        """Of `leaves` leaves from `leaf` on, made in the scratch from `level` on."""
        target = scratch[level * width :][: out.numel()]
        if leaves == 1:
            rank = fold.rank(leaf)
            if leaf >= fold.extra:
                return shown[rank]
            return reduce(shown[rank], shown[rank + 1], target)
        half = leaves // 2
        left = value(leaf, half, level)
        right = value(leaf + half, half, level + 1)
        return reduce(left, right, out if leaves == fold.leaves else target)

    value(0, fold.leaves, 0)

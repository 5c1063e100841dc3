"""Adasum as a reducer: per-segment dot products over the ranks that hold the two operands.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924,
algorithm 1 (vector halving, distance doubling).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

import kernels
from adasum.gram_reduction import Tree, bind_tree, reduce_tree
from adasum.observer import GramObserver, ObservedGram, Observer
from adasum.pieces import ClippedPiece, add_up, are_whole, clip, clipped, device_of, segments_of
from adasum.real_pairs import real_dtype, real_operands
from collectives import Group, Needs, Operands, Reducer
from collectives.schedules.halving import balanced_tree
from kernels.validation import EQUAL, tracing

if TYPE_CHECKING:
    from kernels.gpu.node_kernels import Node

# With more ranks, the products of all pairs do not fit in a program's registers.
_NODE_RANKS = 8


class AdasumReducer(Reducer):
    """Adasum of two vectors, segment by segment.

    `adasum(a, b) = (1 - p/(p+q) a.b/|a|^2) a + (1 - q/(p+q) a.b/|b|^2) b`

    Here p ranks' vectors went into a, and q ranks' into b. If p = q, as always with a power of two
    of ranks outside a line, that is `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`, bit for bit. So
    parallel vectors give their mean over all ranks, for every n and order, and orthogonal ones
    their sum.

    For float16, bfloat16, float32 and float64; dot products and norms are float64. Complex vectors
    count as twice as many reals: a.b is Re<a, b>. Adasum is symmetric, but not associative: the
    result depends on the order of the ranks (adjacent ranks pair first).

    More than two vectors with a tree need one Gram matrix per segment: `gram_reduction.py`.

    On a GPU a pair needs two launches, dots and combination. One cooperative launch would wait
    until all of its programs are resident, perhaps for NCCL's kernel, which waits for another rank.

    Args:
        weighted: False sets p = q for every pair, as Horovod's Adasum does: three parallel vectors
            then weigh 1/4, 1/4 and 1/2.

    Attributes:
        weighted: The argument.
        name: "Adasum" or "Adasum(weighted=False)"; it must be equal on all ranks.

    Examples:
        >>> def two(group):
        ...     return group.all_reduce(torch.eye(2)[group.rank], hvd.Adasum)
        >>> collectives.run_threads(2, two)[0]  # orthogonal: the sum
        tensor([1., 1.])
    """

    name = "Adasum"
    weighted = True
    averages = True
    needs = Needs.ONE_TREE
    reads_tree = True
    replays = True
    reduces_in_shared_memory = True
    _gram: ObservedGram | None = None
    _original: AdasumReducer | None = None

    def __init__(self, *, weighted: bool = True) -> None:
        if not isinstance(weighted, bool):
            raise TypeError(f"weighted must be a bool, got {type(weighted).__name__}")
        self.weighted = weighted
        if not weighted:
            self.name = f"{self.name}(weighted=False)"

    def observed(self) -> Self:
        """Return a copy that keeps the last reduction's Gram matrices, for `take_gram`."""
        observed = copy.copy(self)
        observed._original = self
        # Only a run by the host keeps matrices, not a replayed CUDA graph.
        observed.replays = False
        return observed

    def take_gram(self) -> ObservedGram | None:
        """Return the Gram matrices of an observed copy's last reduction, or None.

        On CUDA, the current stream must have waited for the reduction.
        """
        gram, self._gram = self._gram, None
        if gram is not None and gram.products.is_cuda:
            # They were allocated on the communication stream.
            stream = torch.cuda.current_stream(gram.products.device)
            for each in (gram.products, gram.coefficients, gram.spread):
                each.record_stream(stream)
        return gram

    def _keep_gram(self, gram: ObservedGram) -> None:
        self._gram = gram

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError, naming the dtype, unless the kernels support its reals."""
        if real_dtype(dtype) not in kernels.DTYPES:
            raise TypeError(
                "Adasum reduces float16, bfloat16, float32, float64 and complex tensors, got "
                f"{dtype}"
            )

    def reads_tree_of(self, dtype: torch.dtype) -> bool:
        """Return whether the dtype is narrower than the float64 of Gram matrices."""
        return real_dtype(dtype) != torch.float64

    def reduce(self, operands: Operands) -> None:
        """Write adasum(left, right) of this rank's pieces of the two vectors.

        Each rank adds its partial dot products into a full [S, 3] float64 table, so that the tables
        of all ranks have one shape, even if the bounds of pieces lie inside segments. More than two
        vectors are folded from the left, or joined by the tree.
        """
        operands = real_operands(operands)
        segments, leaves = segments_of(operands), operands.leaves if self.weighted else ()
        if operands.tree:
            reduce_tree(operands, segments, self._weighed(operands.tree), self._keeper(operands))
            return
        if not are_whole(operands, segments):
            _reduce_cut(operands, segments, leaves)
            return
        for parts, out, start in operands.pieces:
            if out.numel():
                inside = clip(segments, start, out.numel())[2]
                left = parts[0]
                for k, right in enumerate(parts[1:], 1):
                    last, weights = out if k == len(parts) - 1 else None, _weights(leaves, k)
                    left = kernels.adasum(
                        left, right, inside, weights=weights, out=last, cooperative=False
                    )

    def bind(self, operands: Operands) -> Callable[[], None]:
        """Return a function that does `reduce(operands)` any number of times, by plans."""
        overridden = type(self).reduce is not AdasumReducer.reduce
        by_tree = bool(operands.tree)
        in_pairs = all(len(piece.parts) == 2 for piece in operands.pieces)
        # No plan can be made while any thread is under a dispatch mode.
        if overridden or not (by_tree or in_pairs) or tracing():
            return super().bind(operands)
        operands = real_operands(operands)
        segments = segments_of(operands)
        if by_tree:
            tree = self._weighed(operands.tree)
            return bind_tree(operands, segments, tree, self._keeper(operands))
        weights = _weights(operands.leaves if self.weighted else (), 1)
        if not are_whole(operands, segments):
            return _bind_cut(operands, segments, weights)
        plans = [
            kernels.plan_adasum(
                left, right, clip(segments, start, out.numel())[2], out=out, cooperative=False
            )
            for (left, right), out, start in operands.pieces
            if out.numel()
        ]

        def run() -> None:
            for plan in plans:
                plan(weights)

        return run

    def runs_on_node(self, dtype: torch.dtype, size: int) -> bool:
        """Return whether the node kernel can reduce: up to 8 ranks, a dtype other than float64.

        Observed copies cannot use it: the kernel keeps no Gram matrices.
        """
        overridden = type(self).reduce is not AdasumReducer.reduce
        narrow = dtype in kernels.DTYPES and self.reads_tree_of(dtype)
        return narrow and not overridden and self._original is None and size <= _NODE_RANKS

    def bind_on_node(
        self, node: Node, flat: Tensor, offset: int, segments: Sequence[int] | None
    ) -> Callable[[], None]:
        """Bind the launch that joins all ranks' vectors by the balanced tree."""
        tree = self._weighed(balanced_tree(node.size))
        return node.bind_adasum(flat.numel(), flat.dtype, tree, segments, offset)

    def _keeper(self, operands: Operands) -> Callable[[ObservedGram], None] | None:
        """Return the method that keeps Gram matrices, if each operand is one rank's vector."""
        ranks = sum(operands.tree[-1][2:])
        own = ranks == len(operands.tree) + 1
        return self._keep_gram if own and self._original is not None else None

    def _weighed(self, tree: Tree) -> Tree:
        """Return the tree with its joins' weights, all 1 if the operator is unweighted."""
        return tree if self.weighted else [(left, right, 1, 1) for left, right, *_ in tree]

    def finish(self, buffer: Tensor, size: int) -> None:
        """Do nothing: Adasum is not divided by the number of ranks."""


def _weights(leaves: Sequence[int], k: int) -> tuple[float, float]:
    """Return the number of ranks in the first k parts, and in the next one."""
    p, q = (sum(leaves[:k]), leaves[k]) if leaves else (1, 1)
    return EQUAL if p == q else (float(p), float(q))


def _reduce_cut(operands: Operands, segments: tuple[int, ...], leaves: Sequence[int]) -> None:
    """Reduce pieces that may cut segments: other ranks may add to the dot products."""
    pieces: list[ClippedPiece] = []
    dots: list[Tensor] = []
    # Compute one piece's dot products before the iterator waits for the next piece.
    for piece in clipped(operands, segments):
        dots.append(kernels.dot_and_norms(piece.parts[0], piece.parts[1], piece.segments))
        pieces.append(piece)
    folds = max((len(piece.parts) - 1 for piece in operands.pieces), default=1)
    left = [piece.parts[0] for piece in pieces]
    for k in range(1, folds + 1):
        if k > 1:
            dots = [
                kernels.dot_and_norms(mine, piece.parts[k], piece.segments)
                for mine, piece in zip(left, pieces, strict=True)
            ]
        table = add_up(pieces, dots, (len(segments) - 1, 3), device_of(operands))
        if operands.sum_partials is not None:
            operands.sum_partials(table)
        for i, piece in enumerate(pieces):
            out = piece.out if k == folds else None
            left[i] = kernels.combine(
                left[i],
                piece.parts[k],
                table[piece.touched],
                piece.segments,
                weights=_weights(leaves, k),
                out=out,
            )


def _bind_cut(
    operands: Operands, segments: tuple[int, ...], weights: tuple[float, float]
) -> Callable[[], None]:
    """Return a function that does `_reduce_cut` of pieces with two parts any number of times."""
    pieces = list(clipped(operands, segments))
    dots = [
        kernels.plan_dot_and_norms(piece.parts[0], piece.parts[1], piece.segments)
        for piece in pieces
    ]
    device = device_of(operands)
    table = torch.zeros(len(segments) - 1, 3, dtype=torch.float64, device=device)
    combinations = [
        kernels.plan_combine(
            piece.parts[0], piece.parts[1], table[piece.touched], piece.segments, out=piece.out
        )
        for piece in pieces
    ]

    def run() -> None:
        table.copy_(add_up(pieces, [plan() for plan in dots], (len(table), 3), device))
        if operands.sum_partials is not None:
            operands.sum_partials(table)
        for combine in combinations:
            combine(weights)

    return run


def observed_copy(op: Reducer) -> Reducer:
    """Return a copy of Adasum that keeps its Gram matrices; any other operator as it is."""
    return op.observed() if isinstance(op, AdasumReducer) else op


def gives_gram(
    observer: Observer | None,
    op: Reducer,
    group: Group,
    tensors: Tensor | Sequence[Tensor],
    **options: Any,
) -> bool:
    """Return whether an all-reduce computes Gram matrices and the observer receives them.

    The same on all ranks. The options are the arguments of `Group.reduces_by_tree`.
    """
    return (
        isinstance(op, AdasumReducer)
        and isinstance(observer, GramObserver)
        and type(op).reduce is AdasumReducer.reduce
        and group.reduces_by_tree(tensors, observed_copy(op), **options)
    )


def require_declared(op: Reducer) -> None:
    """Raise ValueError for a reducer that does not say whether it averages, such as Max."""
    if not isinstance(op.averages, bool):
        raise ValueError(
            "op must be Sum, Average, Adasum or a Reducer that says whether it averages, got "
            f"{op!r}: set its `averages` to True if equal gradients on all ranks give that "
            "gradient, as with Average, otherwise to False"
        )


Adasum = AdasumReducer()
UNWEIGHTED = AdasumReducer(weighted=False)

"""Levels of `direct`: a leaf of the tree is a number of several digits, with a level for each.

At a level the ranks that differ in one digit, k of them, exchange slices of what they hold, and
join their k operands, each of all ranks with the same higher digits, by their part of the balanced
tree. Results go back by the same digits, the last one first. So a rank sends sum(k - 1) messages
where one level sends n - 1, in 2 steps a level; bytes are those of one level, 2 (n - 1) / n of the
buffer each way, and extra memory is (k - 1) / k of it; folding adds two steps, and the buffer to
both. A last digit of radix 2 exchanges whole slices, not halves of them: as many bytes, reduced
twice and not sent back. So does every digit once slices are a 64th of the buffer, which is at most
a third of it more of 65,536 ranks.

The dot products of a level are of operands that all ranks with the same higher digits hold in
pieces. Their tables travel digit by digit, and are added up after each. `vhdd` is all digits of
radix 2. Sources: the radix-k exchange of Peterka et al., "A configurable algorithm for parallel
image-compositing applications", SC 2009; Rabenseifner, ICCS 2004, for halving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from collectives.schedules.folding import Fold, fold_in, joins
from collectives.schedules.schedule import (
    IDLE,
    Action,
    Collective,
    Schedule,
    Step,
    Transfer,
    Tree,
    back,
)

# What ranks exchange tables at once; more go digit by digit.
_MOST_TABLES = 8
# Into how many slices a buffer is cut; smaller ones are not worth a step that sends them back.
_FEW = 64


class Digit(NamedTuple):
    """A level.

    Attributes:
        radix: How many ranks exchange, a power of two.
        stride: How many leaves stand behind each of their operands.
        whole: Whether they exchange all of what they hold.
        held: Radices of the ranks that hold the operands together.
    """

    radix: int
    stride: int
    whole: bool
    held: tuple[int, ...]

    @property
    def tables(self) -> tuple[int, ...]:
        """The digits by which tables travel, as a Step has them."""
        return tables_by(self.held)


def tables_by(held: Iterable[int]) -> tuple[int, ...]:
    """Return the digits by which tables travel between ranks numbered by such radices."""
    found = tuple(radix for radix in held if radix > 1)
    return found if len(found) > 1 and prod(found) > _MOST_TABLES else ()


@lru_cache(maxsize=64)
def digits(radices: tuple[int, ...]) -> tuple[Digit, ...]:
    """Return the levels, the digit of neighbours first."""
    found: list[Digit] = []
    held: tuple[int, ...] = ()
    for number, radix in enumerate(radices):
        last = radix == 2 and 0 < number == len(radices) - 1
        whole = last or prod(held) >= _FEW
        held = held if whole else (*held, radix)
        found.append(Digit(radix, prod(radices[:number]), whole, held))
    return tuple(found)


def _split(radices: tuple[int, ...]) -> int:
    """Return how many chunks there are: as many as slices of slices."""
    return prod(digits(radices)[-1].held)


def _kept(radices: tuple[int, ...]) -> int:
    """Return how many of the last levels leave all ranks of a digit with the result."""
    return sum(digit.whole for digit in digits(radices))


@lru_cache(maxsize=256)
def _tree(fold: Fold, first: int, digit: Digit) -> Tree:
    """Return how the operands of the blocks of leaves from `first` on are joined."""
    firsts = range(first, first + digit.radix * digit.stride, digit.stride)
    return joins([(d, fold.behind(leaf, digit.stride)) for d, leaf in enumerate(firsts)])


def _scatter(fold: Fold, leaf: int, radices: tuple[int, ...]) -> Iterator[Step]:
    start, stop = 0, _split(radices)
    for digit in digits(radices):
        radix, stride = digit.radix, digit.stride
        mine = leaf // stride % radix
        zero = leaf - mine * stride
        width = 0 if digit.whole else (stop - start) // radix
        length = width or stop - start
        firsts = [start + d * width for d in range(radix)]
        start, stop = firsts[mine], firsts[mine] + length
        behind = fold.behind(leaf, stride)
        # The next one first, so that not all begin with digit 0.
        next_ones = [d % radix for d in range(mine + 1, mine + radix)]
        yield Step(
            sends=tuple(
                Transfer(fold.rank(zero + d * stride), firsts[d], firsts[d] + length)
                for d in next_ones
            ),
            recvs=tuple(
                Transfer(fold.rank(peer), start, stop, action, (behind, fold.behind(peer, stride)))
                for d in sorted(next_ones)
                for peer in [zero + d * stride]
                for action in [Action.REDUCE_LEFT if d < mine else Action.REDUCE_RIGHT]
            ),
            group=fold.block(leaf, prod(digit.held)),
            tree=_tree(fold, zero - zero % stride, digit),
            digits=digit.tables,
        )


@lru_cache(maxsize=64)
def all_reduce(size: int, radices: tuple[int, ...]) -> Schedule:
    """Return `direct` in levels.

    radices: Of every digit, powers of two whose product is the largest that is at most `size`; the
    ranks beyond that are folded in.
    """
    fold, chunks = Fold(size), _split(radices)
    if prod(radices) != fold.leaves or any(k < 2 or k & (k - 1) for k in radices):
        raise ValueError(f"radices must be powers of two that make {fold.leaves}, got {radices}")

    def steps(rank: int) -> Iterator[Step]:
        leaf = fold.leaf(rank)
        idle = [IDLE] * len(radices)
        scatter = [
            *fold_in(fold, rank, chunks),
            *(idle if leaf is None else _scatter(fold, leaf, radices)),
        ]
        yield from scatter
        yield from back(scatter[: len(scatter) - _kept(radices)])

    return Schedule("direct", size, chunks, Collective.ALL_REDUCE, steps)

"""One-shot: every rank sends its vector to all others, and reduces all of them by itself.

Wins where a step costs more than the messages in it, on few ranks and small buffers, as on GPUs of
one node: one step whatever the number of ranks, where `bruck` takes ceil(log2 n) for as many bytes.
A rank sends n - 1 messages, so that of many ranks `bruck` and `rd` are faster; n - 1 buffers go
each way, with n as extra memory. As in `bruck` the tree is the line ((0 · 1) · 2) · ..., and an
operator that needs all operands, or the tree of order="tree", has them at once. Source: the
one-shot all-reduce of NVIDIA's TensorRT-LLM and of PyTorch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from collectives.schedules.algorithm import ALL, Algorithm, Order, by_size
from collectives.schedules.schedule import Collective, Schedule, Step, Transfer


def _steps(size: int, rank: int) -> Iterator[Step]:
    # The next rank first, so that not all begin with rank 0.
    others = [other % size for other in range(rank + 1, rank + size)]
    if others:
        yield Step(
            sends=tuple(Transfer(peer, rank, rank + 1) for peer in others),
            recvs=tuple(Transfer(peer, peer, peer + 1) for peer in others),
        )


@lru_cache(maxsize=256)
def all_reduce(size: int) -> Schedule:
    """Return `oneshot`: one step, n - 1 buffers each way."""
    steps = partial(_steps, size)
    return Schedule("oneshot", size, size, Collective.ALL_REDUCE, steps, gathered=True)


ONE_SHOT = Algorithm(
    "oneshot",
    "every rank sends its vector to all others, in one step",
    Order.LINE,
    ALL,
    schedule=by_size(all_reduce),
    outer=False,
)

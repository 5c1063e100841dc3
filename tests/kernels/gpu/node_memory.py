"""Memory of a node's ranks in one address space, for kernels that several ranks launch."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

import kernels
from kernels.gpu.node_kernels import ONE_SHOT_BYTES, Node, pad_bytes
from kernels.gpu.signals import MAX_PROGRAMS
from tests.kernels.cases import random
from tests.kernels.trees import balanced
from tests.ptx_emulator.driver import Emulator

# Bytes of a buffer before and behind the vector, which nothing may touch.
GUARD = 64


def _aligned(nbytes: int) -> Tensor:
    """uint8 memory that starts at a multiple of 16, every bit set: NaN in all dtypes."""
    raw = torch.full((nbytes + 16,), 0xFF, dtype=torch.uint8)
    first = -raw.data_ptr() % 16
    return raw[first : first + nbytes]


class Ranks:
    """The buffers, pads and nodes of `size` ranks, and a vector for each.

    Attributes:
        vectors: What the ranks put in, fresh for every seed.
        results: A tensor of NaN for each.
        tree: By which Adasum joins them.
        segments: Of Adasum.
        nodes: What each rank launches with.
    """

    def __init__(
        self,
        size: int,
        numel: int,
        dtype: torch.dtype,
        seed: int = 0,
        timeout: float = 600.0,
        segments: tuple[int, ...] | None = None,
    ) -> None:
        self.tree, self.segments = balanced(size), segments or (0, numel)
        self.size, self.numel, self.dtype = size, numel, dtype
        self.vectors = [random(numel, dtype, "cpu", 100 * seed + rank) for rank in range(size)]
        self.results = [torch.full_like(x, torch.nan) for x in self.vectors]
        self._buffers = [_aligned(numel * dtype.itemsize + 2 * GUARD) for _ in range(size)]
        # Of a pad only the places of programs that have a tile: the emulator follows every byte.
        counters = pad_bytes(size) - 2 * ONE_SHOT_BYTES
        tiles = -(-numel * dtype.itemsize // 2048)
        self.pads = [_aligned(counters + 2 * 4096 * min(tiles, 64)) for _ in range(size)]
        for pad in self.pads:
            pad[: MAX_PROGRAMS * size * 8] = 0
        places = [[one.data_ptr() for one in some] for some in (self._buffers, self.pads)]
        self.nodes = [Node(rank, *places, torch.device("cpu"), timeout) for rank in range(size)]

    def fill(self) -> None:
        """Put each rank's vector into its buffer."""
        for rank, x in enumerate(self.vectors):
            self.held(rank).copy_(x)

    def held(self, rank: int) -> Tensor:
        """Return what a rank's buffer holds in the place of the vector."""
        stop = GUARD + self.numel * self.dtype.itemsize
        return self._buffers[rank][GUARD:stop].view(self.dtype)

    def put(
        self,
        emulator: Emulator,
        kinds: str,
        scale: float = 1.0,
        number: int = 0,
        absent: Collection[int] = (),
    ) -> None:
        """Launch on every rank what `kinds` names.

        "fill" its buffer, sum in the buffers by "two" shots, join by "adasum" there, "read" that to
        the results, sum to the results by "one" shot. "scatter" and "join" leave each rank the
        slice of a sum and of Adasum, which "gather" writes to all. number: the emulator's of this
        node.
        """
        for rank in {*range(self.size)} - {*absent}:
            emulator.node, emulator.rank = number, number * self.size + rank
            node, x = self.nodes[rank], self.vectors[rank]
            held, out = self.held(rank), self.results[rank]
            for kind in kinds.split():
                if kind == "fill":
                    kernels.sum_n([x], out=held)
                elif kind == "read":
                    kernels.sum_n([held], out=out)
                elif kind == "gather":
                    node.bind_gather(self.numel, self.dtype, GUARD)()
                elif kind in ("two", "scatter"):
                    part = node if kind == "two" else node.scattering()
                    part.bind_two_shot(self.numel, self.dtype, GUARD)(scale)
                elif kind in ("adasum", "join"):
                    part = node if kind == "adasum" else node.scattering()
                    part.bind_adasum(self.numel, self.dtype, self.tree, self.segments, GUARD)()
                else:
                    node.bind_one_shot(x, out)(scale)

    def run(
        self, emulator: Emulator, kinds: str, scale: float = 1.0, absent: Collection[int] = ()
    ) -> None:
        """Launch, and run all of it together."""
        with emulator.together():
            self.put(emulator, kinds, scale, absent=absent)

    def check_guards(self) -> None:
        """Raise AssertionError if anything was written beside the vectors."""
        for buffer in self._buffers:
            assert (buffer[:GUARD] == 0xFF).all()
            assert (buffer[GUARD + self.numel * self.dtype.itemsize :] == 0xFF).all()


def interleave(
    emulator: Emulator,
    size: int,
    count: int,
    nodes: int,
    delay: int,
    make: Callable[[int, int], tuple[Ranks, str]],
    check: Callable[[Ranks, str], None],
) -> None:
    """Run interleavings of several launches a rank, ranks late among them.

    Args:
        emulator: Where.
        size: Ranks.
        count: How many, each of other numbers and in another order.
        nodes: How many run at once, which share nothing but the emulator's steps.
        delay: Nanoseconds by which every fourth rank is late.
        make: Returns the ranks of a batch with this number, and the kinds of launches of the batch.
        check: Looks at what each node's ranks have then.
    """
    for first in range(0, count, nodes):
        some = [make(first // nodes, k) for k in range(first, min(first + nodes, count))]
        emulator.seed = first
        late = [(seed + rank) % 4 == 0 for seed in range(len(some)) for rank in range(size)]
        with emulator.together([delay * one for one in late]):
            for k, (ranks, kinds) in enumerate(some):
                ranks.put(emulator, kinds, number=k)
        for ranks, kinds in some:
            check(ranks, kinds)

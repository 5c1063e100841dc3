"""Segments of a buffer, cut into chunks and tiles, as a table in device memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.gpu import launcher
from kernels.gpu.device_tables import TABLES, upload

# The maximum number of chunks, in addition to two per segment. The first applies to sums, since the
# last program to arrive adds up the partials of all chunks. The second applies to everything else:
# on an H200 a blend of 1 GiB took 888 us in 2,048 chunks, and 800 us in 65,536.
_MAX_CHUNKS, _MAX_UNSUMMED = 2048, 65536


class Chunks(NamedTuple):
    """The chunks of one buffer.

    Attributes:
        table: int64, one row (start, length, segment) per chunk, then one (first chunk, number of
            chunks) per segment.
        host: The host tensor that was uploaded.
        chunks: Number of chunks.
        segments: Number of segments.
        block: Elements per tile.
        warps: Warps per program.
        one_tile: Whether every chunk is a single tile.
    """

    table: Tensor
    host: Tensor
    chunks: int
    segments: int
    block: int
    warps: int
    one_tile: bool


def cut(
    bounds: tuple[int, ...], block: int, vector: int, tiles: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return chunk rows [C, 3] and segment rows [S, 2], with `tiles` tiles per chunk.

    Inside segments, chunks are cut between whole vectors of `vector` elements. An empty segment
    gets one empty chunk, so that its row of zeros is written.
    """
    edges = np.array(bounds, dtype=np.int64)
    low, high = edges[:-1], edges[1:]
    span = tiles * block
    base = low // vector * vector
    counts = np.where(high > low, -(-(high - base) // span), 1)
    first = np.cumsum(counts) - counts
    segment = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    within = (np.arange(len(segment), dtype=np.int64) - first[segment]) * span
    start = np.maximum(base[segment] + within, low[segment])
    stop = np.minimum(base[segment] + within + span, high[segment])
    return (
        np.stack([start, stop - start, segment], axis=1),
        np.stack([first, counts], axis=1),
    )


def _tiles(bounds: tuple[int, ...], block: int, most: int) -> int:
    """Return the number of tiles of the longest chunk."""
    return max(1, -(-bounds[-1] // (block * most)))


def tile_of(numel: int, itemsize: int) -> tuple[int, int]:
    """(elements per tile, warps) from only size and dtype, since both change the bits of a sum.

    A tile is at most as large as the registers of 128 threads hold, with four such programs on a
    multiprocessor, so that one reads while another adds. 16-bit tiles do not have more elements,
    which would spill. Tiles are smaller if there would be fewer than 256, two per multiprocessor.
    """
    largest = 2048 if itemsize == 8 else 4096
    return min(largest, max(1024, launcher.power_of_two_above(numel // 512))), 4


def chunks_of(a: Tensor, bounds: tuple[int, ...], summed: bool = True) -> Chunks:
    """Return the chunks of buffers of bounds[-1] elements of the dtype of `a`, on its device.

    summed: Whether the chunks' partials are added up.
    """
    itemsize = a.element_size()
    block, warps = tile_of(bounds[-1], itemsize)
    tiles = _tiles(bounds, block, _MAX_CHUNKS if summed else _MAX_UNSUMMED)

    def make(pinned: Tensor | None) -> Chunks:
        rows, shares = cut(bounds, block, 16 // itemsize, tiles)
        table, host = upload(np.concatenate([rows.ravel(), shares.ravel()]), a.device, pinned)
        return Chunks(table, host, len(rows), len(shares), block, warps, tiles == 1)

    key = ("chunks", itemsize, block, tiles, bounds)
    found: Chunks = TABLES.fetch(key, a.device, make)
    return found


class Aligned:
    """Tensors on 16-byte boundaries: the given ones, or copies to refresh before each launch.

    Vector and scalar accesses put different elements into a thread, so sums round differently.
    Ranks must get the same bits wherever their buffers start; bits may depend only on segments.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = [
            one if one.data_ptr() % 16 == 0 else torch.empty_like(one.detach()) for one in tensors
        ]
        pairs = zip(self.tensors, tensors, strict=True)
        self._copies = [(copy, one) for copy, one in pairs if copy is not one]

    def refresh(self) -> None:
        """Copy the unaligned tensors, in the order of the current stream."""
        for copy, one in self._copies:
            copy.copy_(one.detach())

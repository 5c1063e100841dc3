"""How the projection cuts a buffer into segments' chunks and tiles, as a table in device memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.gpu import launcher
from kernels.gpu.device_tables import TABLES, upload

# So many partials at most, beside one a segment: the last program to arrive adds them up alone.
_MAX_CHUNKS = 2048


class Chunks(NamedTuple):
    """How one buffer is cut.

    Attributes:
        table: int64 rows (start, length, segment) a chunk, then rows (first chunk, chunks) a
            segment.
        host: What was uploaded.
        chunks: How many there are.
        segments: How many there are.
        block: Elements of a tile.
        warps: Of a program.
        one_tile: Whether every chunk is a single tile.
        vector_bounds: Whether every chunk starts and ends at a multiple of 16 bytes from the start.
    """

    table: Tensor
    host: Tensor
    chunks: int
    segments: int
    block: int
    warps: int
    one_tile: bool
    vector_bounds: bool


def cut(bounds: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Chunk rows [C, 3], segment rows [S, 2] and the tiles of the longest chunk.

    An empty segment keeps one empty chunk, so that its row of zeros gets written.
    """
    edges = np.array(bounds, dtype=np.int64)
    sizes = np.diff(edges)
    tiles = _tiles(bounds, block)
    span = tiles * block
    counts = np.maximum(-(-sizes // span), 1)
    first = np.cumsum(counts) - counts
    segment = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    within = (np.arange(len(segment), dtype=np.int64) - first[segment]) * span
    length = np.minimum(sizes[segment] - within, span)
    rows = np.stack([edges[:-1][segment] + within, length, segment], axis=1)
    return rows, np.stack([first, counts], axis=1), tiles


def _tiles(bounds: tuple[int, ...], block: int) -> int:
    """Of the longest chunk."""
    return max(1, -(-bounds[-1] // (block * _MAX_CHUNKS)))


def tile_of(numel: int, itemsize: int) -> tuple[int, int]:
    """(elements a tile, warps) from size and dtype alone: both change the bits of a sum.

    About 128 tiles, one a multiprocessor, up to the 64 KiB an input that registers hold. More
    than 128 of those no chip holds: then smaller tiles, so that one program reads while another
    on its multiprocessor adds.
    """
    largest = 8192 if itemsize == 8 else 16384
    if numel > 128 * largest:
        block = largest // 4
    else:
        block = min(largest, max(1024, launcher.power_of_two_above(numel // 128)))
    return block, min(16, max(4, 16 * block // largest))


def chunks_of(a: Tensor, bounds: tuple[int, ...]) -> Chunks:
    """Return the chunks of buffers like `a`, their table in device memory."""
    itemsize = a.element_size()
    block, warps = tile_of(a.numel(), itemsize)

    def make() -> Chunks:
        rows, shares, tiles = cut(bounds, block)
        table, host = upload(np.concatenate([rows.ravel(), shares.ravel()]), a.device)
        whole = bool(np.all(rows[:, :2] * itemsize % 16 == 0))
        return Chunks(table, host, len(rows), len(shares), block, warps, tiles == 1, whole)

    key = ("chunks", itemsize, block, _tiles(bounds, block), bounds)
    found: Chunks = TABLES.fetch(key, a.device, make)
    return found

"""Sums of all ranks' vectors of a node in one launch per rank, in memory that its GPUs share.

Two-shot: each rank adds up its slice, read directly from the peers' buffers, and overwrites the
vectors in all buffers with the result. Programs with the same number on all ranks work on the same
tiles of their slices, and wait only for each other: until all have started, since the vectors are
in the buffers when a launch begins, and until all have written.

Adasum is two-shot, too: node_adasum.py.

With several nodes, the launch of a sum or of Adasum writes each slice only to its rank's own
buffer. After the slices are reduced across nodes, a second launch, of `_two_shot_kernel` with one
vector to add up, writes them to all buffers.

One-shot, for small vectors, when a wait would cost more than the bytes: each rank reads all vectors
whole. Each program copies its tile to one of two places in its pad, used alternately, signals,
waits, and adds up. A place is written again two launches later, when the peers have started the
launch in between, and thus have ended the one before.

Ranks are added in order, from 0 on, in float32, or in float64 for float64, with one rounding at the
end. The bits are the same as of `sum_n`, and on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.call import check_tree
from kernels.gpu import launcher, node_adasum
from kernels.gpu.device_tables import upload
from kernels.gpu.launcher import Kernel, jit, tl, triton
from kernels.gpu.node_slices import slice_of, slice_with
from kernels.gpu.signals import (
    MAILBOX_BYTES,
    MAX_PROGRAMS,
    STATE_WORDS,
    Peers,
    end_turn,
    places_at,
    rank_barrier,
    turn_of,
)
from kernels.gpu.sum_kernels import in_order
from kernels.gpu.tiles import (
    convert,
    float_of,
    load_tile,
    no_tiles,
    part_of,
    store_tile,
    store_to_all,
)
from kernels.validation import check_segments

# Maximum bytes of a program's tile in a one-shot sum, which are the bytes of its place.
_TILE_BYTES = 4096
_PLACE = _TILE_BYTES if triton is None else tl.constexpr(_TILE_BYTES)
ONE_SHOT_BYTES = MAX_PROGRAMS * _TILE_BYTES
TWO_SHOT_TILE_BYTES = 4096
MAX_RANKS = 32
# All programs of a launch must be resident, since other ranks' programs wait for them. There are so
# few that they may use many registers; without a limit ptxas would spill.
OPTIONS = {"launch_cooperative_grid": True, "maxnreg": 128}
# So many multiprocessors hold all programs of any launch here: by registers, two of Adasum's each.
MULTIPROCESSORS = MAX_PROGRAMS // 2
_PHASES = (
    "ran all of its programs at once",
    "came",
    "did its part",
    "wrote its part of the result",
)
_GIVEN_UP = 1 << 62
# Checks of the peers' counters between two checks of the clock: about a third of a millisecond.
_SPINS = 256


# (left, right, p, q), as `adasum_coefficients` takes them.
Rows = Sequence[tuple[int, int, float, float]]


@jit
def _many_at_once(
    addresses,
    offset,
    count,
    n,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of `in_order`, of whole vectors, with up to eight ranks' tiles in flight at a time.

    A peer's memory is far away: with the tiles loaded one after the other, so few programs would
    not use the links' full rate. More tiles do not fit in the registers.
    """
    MANY: tl.constexpr = SIZE if SIZE < 8 else 8
    total = tl.zeros([BLOCK], SUM)
    for first in range(0, n, MANY):
        tiles = no_tiles()
        for k in tl.static_range(MANY):
            at = tl.load(addresses + tl.minimum(first + k, n - 1)) + offset
            tiles += (load_tile(at, tl.where(first + k < n, count, 0), DTYPE, True, BLOCK),)
        for k in tl.static_range(MANY):
            # Behind the last rank are zeros, which change nothing: a sum from 0.0 on is never -0.0.
            total += convert(tiles[k], SUM)
    return total


@Kernel
def _two_shot_kernel(
    scale_bits: tl.int64,
    sources,
    vectors: tl.int32,
    targets,
    written: tl.int32,
    pads,
    state,
    limit: tl.int64,
    rank: tl.int32,
    n: tl.int32,
    start: tl.int64,
    length: tl.int64,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    SPINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of this rank's slice of the vectors to all targets."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    scale = float_of(scale_bits).to(WIDE)
    peers = Peers(pads, state, limit, rank, n)
    turn = turn_of(state)
    going = turn >= 0
    if going:
        going = rank_barrier(peers, turn, 1, SIZE, SPINS)
    if going:
        for tile in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
            first = tl.cast(tile, tl.int64) * BLOCK
            count = tl.minimum(length - first, BLOCK)
            at = (start + first) * BYTES
            if count % VECTOR == 0:
                x = _many_at_once(sources, at, count, vectors, DTYPE, WIDE, SIZE, BLOCK)
                x = convert(x * scale, DTYPE)
                store_to_all(targets, at, count, x, rank, written, True)
            else:
                # In parts, in a loop that is not unrolled: see scalar_pointer.
                PART: tl.constexpr = part_of(BLOCK, 4)
                for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                    done = part * PART
                    here = at + done * BYTES
                    left = count - done
                    y = in_order(sources, here, left, vectors, DTYPE, WIDE, False, False, PART)
                    y = convert(y * scale, DTYPE)
                    store_to_all(targets, here, left, y, rank, written, False)
        going = rank_barrier(peers, turn + 1, 3, SIZE, SPINS)
    if going:
        end_turn(state, turn + 2)


@Kernel
def _one_shot_kernel(
    scale_bits: tl.int64,
    x,
    out,
    pads,
    state,
    limit: tl.int64,
    rank: tl.int32,
    n: tl.int32,
    numel: tl.int64,
    ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    SPINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of one tile of all vectors to `out`, which may be x."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    PART: tl.constexpr = part_of(BLOCK, 4)
    program = tl.program_id(0).to(tl.int64)
    count = tl.minimum(numel - program * BLOCK, BLOCK)
    offset = program * BLOCK * BYTES
    scale = float_of(scale_bits).to(WIDE)
    turn = turn_of(state)
    going = turn >= 0
    vectors = (count % VECTOR == 0) & ALIGNED
    place = places_at(n) + (2 * program + (turn & 1)) * _PLACE
    if going:
        mine = tl.load(pads + rank) + place
        if vectors:
            held = load_tile(x.to(tl.int64) + offset, count, DTYPE, True, BLOCK)
            store_tile(mine, count, held, True)
        else:
            for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                done = part * PART
                from_x = x.to(tl.int64) + offset + done * BYTES
                few = load_tile(from_x, count - done, DTYPE, False, PART)
                store_tile(mine + done * BYTES, count - done, few, False)
        going = rank_barrier(Peers(pads, state, limit, rank, n), turn, 1, SIZE, SPINS)
    if going:
        to = out.to(tl.int64) + offset
        if vectors:
            total = in_order(pads, place, count, n, DTYPE, WIDE, False, True, BLOCK)
            store_tile(to, count, convert(total * scale, DTYPE), True)
        else:
            for part in tl.range(0, BLOCK // PART, loop_unroll_factor=1):
                done = part * PART
                here = place + done * BYTES
                some = in_order(pads, here, count - done, n, DTYPE, WIDE, False, False, PART)
                store_tile(to + done * BYTES, count - done, convert(some * scale, DTYPE), False)
        end_turn(state, turn + 1)


def pad_bytes(size: int) -> int:
    """Return the bytes of each of `size` ranks' signal pads: counters, mailboxes and places."""
    return MAX_PROGRAMS * size * 8 + MAILBOX_BYTES + 2 * ONE_SHOT_BYTES


class Node:
    """This rank's view of memory that all GPUs of its node can access.

    All ranks launch the same kernels in the same order, each on one stream.

    Args:
        rank: This rank's number on the node.
        buffers: The address of each rank's buffer in this process, a multiple of 16.
        pads: Likewise of each rank's signal pad, `pad_bytes` long: zeros before any rank launches.
        device: The GPU that this rank's kernels run on.
        timeout: Seconds that each wait for a peer in a launch may take.

    Raises:
        ValueError: An address is not aligned, there are more than MAX_RANKS ranks, or the numbers
            of buffers and pads differ.
    """

    def __init__(
        self,
        rank: int,
        buffers: Sequence[int],
        pads: Sequence[int],
        device: torch.device,
        timeout: float = 600.0,
    ) -> None:
        if len(buffers) != len(pads) or not 0 <= rank < len(pads) <= MAX_RANKS:
            raise ValueError(
                f"buffers and pads must be one for each rank, at most {MAX_RANKS}, got "
                f"{len(buffers)} and {len(pads)} on rank {rank}"
            )
        if any(address % 16 for address in (*buffers, *pads)):
            raise ValueError("a buffer or pad does not start at a multiple of 16 bytes")
        self.rank, self.size, self.device = rank, len(pads), device
        self._places = [*buffers]
        self._buffers, self._host = upload(np.array([*buffers, *pads], np.int64), device)
        self._pads = self._buffers[self.size :]
        # Tables of addresses, and how many of their entries to use.
        self._all, self._own = (self._buffers, self.size), (self._buffers[rank:], 1)
        self._written = self._all
        # In the host's memory, which the GPU can access; NumPy reads it in a tenth of torch's time.
        error = torch.zeros(1, dtype=torch.int64)
        self._error = (error.pin_memory() if device.type == "cuda" else error).numpy()
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self._state[-1] = self._error.ctypes.data
        self._limit = int(timeout * 1e9)
        self._copies = torch.empty(0, dtype=torch.uint8, device=device)

    def check(self, names: Sequence[int] = ()) -> None:
        """Raise TimeoutError if a launch has timed out; do not wait for launches under way.

        Later launches of this node do nothing. names: The ranks' names, if not their numbers.
        """
        if error := int(self._error[0]):
            raise TimeoutError(self._describe(error, names))

    def give_up(self) -> None:
        """End launches that wait for a peer, and the launches after them; return at once."""
        if not self._error[0]:
            self._error[0] = _GIVEN_UP

    def _describe(self, error: int, names: Sequence[int]) -> str:
        names = names or range(self.size)
        missing = [names[q] for q in range(self.size) if error >> q & 1]
        if not missing:
            return f"rank {names[self.rank]} gave up its launches"
        return (
            f"rank {names[self.rank]} waited {self._limit / 1e9:g} s, and no sign came that "
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} "
            f"{_PHASES[error >> 32]}"
        )

    def scattering(self) -> Node:
        """Return a copy whose launches write each rank's slice only to the rank's own buffer."""
        part = copy.copy(self)
        part._written = self._own
        return part

    def slice(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Return the (start, length) of this rank's slice of a vector."""
        return slice_of(numel, itemsize, self.size, self.rank)

    def bind_sum(self, x: Tensor, offset: int) -> Callable[[float], None]:
        """Bind the launch that replaces all ranks' x by their sum, in one shot or two.

        Call the result with a factor for the sum, the same on all ranks.

        Args:
            x: This rank's vector, 1-D.
            offset: The vector's start in each buffer, in bytes, a multiple of 16.
        """
        if x.nbytes <= ONE_SHOT_BYTES and self._written is self._all:
            return self.bind_one_shot(x, x)
        return self.bind_two_shot(x.numel(), x.dtype, offset)

    def bind_two_shot(
        self, numel: int, dtype: torch.dtype, offset: int = 0, *, gather: bool = False
    ) -> Callable[[float], None]:
        """Bind the launch that replaces the vectors in the ranks' buffers by their sum.

        Call the result with a factor for the sum, the same on all ranks.

        Args:
            numel: The length of each vector.
            dtype: The vectors' dtype.
            offset: The vector's start in each buffer, in bytes, a multiple of 16.
            gather: Instead of the sum, write this rank's slice of its own buffer to all buffers.

        Raises:
            ValueError: `offset` is not a multiple of 16.
        """
        if offset % 16:
            raise ValueError(f"offset is {offset}: vectors start at multiples of 16 bytes")
        start, length = self.slice(numel, dtype.itemsize)
        # Equal on all ranks, since their programs wait for each other: by the longest slice.
        longest = slice_of(numel, dtype.itemsize, self.size, 0)[1]
        block, warps = launcher.block_of(longest, dtype.itemsize, TWO_SHOT_TILE_BYTES)
        launch = _two_shot_kernel.bind(
            max(1, min(MAX_PROGRAMS, -(-longest // block))),
            (0,),
            *(self._own if gather else self._all),
            *(self._all if gather else self._written),
            *self._shared(),
            offset // dtype.itemsize + start,
            length,
            **self._constants(dtype, block, warps),
        )
        return lambda scale: launch(*launcher.bits_of(scale))

    def bind_gather(self, numel: int, dtype: torch.dtype, offset: int = 0) -> Callable[[], None]:
        """Bind the launch that writes each rank's slice to all buffers; like `bind_two_shot`."""
        return partial(self.bind_two_shot(numel, dtype, offset, gather=True), 1.0)

    def bind_one_shot(self, x: Tensor, out: Tensor) -> Callable[[float], None]:
        """Bind the launch that writes the sum of the ranks' x to each rank's `out`, which may be x.

        Call the result with a factor for the sum, the same on all ranks.

        Args:
            x: At most ONE_SHOT_BYTES, in any memory of this GPU.
            out: A tensor of x's length and dtype.

        Raises:
            ValueError: x is longer than ONE_SHOT_BYTES.
        """
        nbytes = x.numel() * x.element_size()
        if nbytes > ONE_SHOT_BYTES:
            raise ValueError(f"x has {nbytes} bytes, a one-shot sum at most {ONE_SHOT_BYTES}")
        # Places have one size. With few elements, smaller tiles give more programs some work.
        tile_bytes = 2048 if nbytes <= MAX_PROGRAMS * 2048 else _TILE_BYTES
        block = tile_bytes // x.element_size()
        launch = _one_shot_kernel.bind(
            max(1, -(-x.numel() // block)),
            (0,),
            x,
            out,
            *self._shared(),
            x.numel(),
            ALIGNED=(x.data_ptr() | out.data_ptr()) % 16 == 0,
            **self._constants(x.dtype, block, 4),
        )
        return lambda scale: launch(*launcher.bits_of(scale))

    def add_up(self, table: Tensor) -> None:
        """Sum all ranks' tables in place, in one launch per ONE_SHOT_BYTES."""
        for part in table.view(-1).split(ONE_SHOT_BYTES // table.element_size()):
            self.bind_one_shot(part, part)(1.0)

    def bind_adasum(
        self,
        numel: int,
        dtype: torch.dtype,
        tree: Rows,
        segments: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Callable[[], None]:
        """Bind the launch that replaces the vectors in the ranks' buffers by their Adasum.

        If vectors may cancel beyond `SPREAD_LIMIT`, their dot products are computed in
        double-double, as in `gram(precise=True)`. The result has the bits of the algorithm `direct`
        if the slices of `direct` begin at multiples of 16 bytes, too; otherwise `direct` cuts its
        float64 sums at other elements.

        Args:
            numel: The length of each vector.
            dtype: The vectors' dtype: float16, bfloat16 or float32. float64 is joined by pairs,
                since its own rounding errors would dominate a Gram matrix.
            tree: The ranks' pairs with their weights, as in `adasum_coefficients`.
            segments: Element boundaries (0, ..., numel), None for one segment.
            offset: The vector's start in each buffer, in bytes, a multiple of 16.

        Raises:
            TypeError: The dtype is not supported, or an argument has a wrong type.
            ValueError: There are more than 8 ranks, or an argument has an invalid value.
        """
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"Adasum of a node takes float16, bfloat16 and float32, got {dtype}: join by pairs"
            )
        if self.size > node_adasum.MAX_RANKS:
            raise ValueError(f"Adasum of a node takes at most 8 ranks, got {self.size}")
        if offset % 16:
            raise ValueError(f"offset is {offset}: vectors start at multiples of 16 bytes")
        bounds, joins = check_segments(segments, numel), check_tree(tree, self.size)
        if numel == 0 or self.size == 1:
            return launcher.nothing
        places = [slice_of(numel, dtype.itemsize, self.size, rank) for rank in range(self.size)]
        slices = [slice_with(bounds, *one, places[0][1]) for one in places]
        first = offset + slices[self.rank].start * dtype.itemsize
        return node_adasum.bind(
            slices,
            self.rank,
            [place + first for place in self._places],
            joins,
            dtype,
            (self._pads, self._state, self._limit),
            self._copies_of,
            _SPINS,
            alone=self._written is self._own,
        )

    def _copies_of(self, nbytes: int) -> Tensor:
        """Return memory for use within one launch."""
        if self._copies.numel() < nbytes:
            self._copies = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._copies

    def _shared(self) -> tuple[Tensor | int, ...]:
        return self._pads, self._state, self._limit, self.rank, self.size

    def _constants(self, dtype: torch.dtype, block: int, warps: int) -> dict[str, Hashable]:
        return {
            "DTYPE": dtype,
            "WIDE": compute_dtype(dtype),
            "SIZE": launcher.power_of_two_above(max(self.size, 2)),
            "SPINS": _SPINS,
            "BLOCK": block,
            "num_warps": warps,
            **OPTIONS,
        }

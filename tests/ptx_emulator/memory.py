"""Global and shared memory of the emulated threads, with every access checked."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kernels.validation import PLAIN
from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.races import Clocks, Races

SECTOR = 32


class AccessError(RuntimeError):
    """An access is out of bounds or misaligned, or two values are stored at one address."""


@dataclass
class Traffic:
    """What one launch asked of global memory.

    Attributes:
        load_sectors: Sectors of 32 bytes loaded, each once per request, by bytes per thread.
        store_sectors: Sectors of 32 bytes stored to, likewise.
        distinct_loaded: Bytes of all sectors loaded, each once in the launch: what must move if
            caches hold everything in between.
        distinct_stored: Bytes of all sectors stored to, likewise.
        past_l1: Sectors that L2 is asked for, by bytes per thread: each once a request, and of
            loads that stay in L1 once a program, if that holds all that a program loads.
    """

    load_sectors: Counter[int] = field(default_factory=Counter)
    store_sectors: Counter[int] = field(default_factory=Counter)
    _past: Counter[int] = field(default_factory=Counter)
    _kept: dict[int, list[Array]] = field(default_factory=lambda: defaultdict(list), repr=False)
    _loaded: list[Array] = field(default_factory=list, repr=False)
    _stored: list[Array] = field(default_factory=list, repr=False)

    def count(
        self, addresses: Array, warps: Array, size: int, store: bool, kept: int | None
    ) -> None:
        """Count one instruction: the addresses its threads ask for and the warps they are of.

        kept: for a load that stays in L1 the warps of a program.
        """
        first, last = addresses // SECTOR, (addresses + size - 1) // SECTOR
        sectors = first if size <= SECTOR and (first == last).all() else np.r_[first, last]
        lanes = warps if sectors is first else np.r_[warps, warps]
        # Sectors of a process fit in 43 bits.
        touched = np.unique(sectors.astype(np.int64) | lanes.astype(np.int64) << 43)
        distinct = np.unique(sectors)
        if kept is None:
            self._past[size] += len(touched)
        else:
            sector, warp = touched & ((1 << 43) - 1), touched >> 43
            self._kept[size].append(np.unique(sector | warp // kept << 43))
        if store:
            self.store_sectors[size] += len(touched)
            self._stored.append(distinct)
        else:
            self.load_sectors[size] += len(touched)
            self._loaded.append(distinct)

    @property
    def past_l1(self) -> Counter[int]:
        kept = {size: _distinct(parts) // SECTOR for size, parts in self._kept.items()}
        return self._past + Counter(kept)

    @property
    def distinct_loaded(self) -> int:
        return _distinct(self._loaded)

    @property
    def distinct_stored(self) -> int:
        return _distinct(self._stored)


def _distinct(parts: list[Array]) -> int:
    return SECTOR * len(np.unique(np.concatenate(parts))) if parts else 0


class Memory:
    """One address space, which moves elements as unsigned integers of 2, 4 or 8 bytes.

    Args:
        name: What messages call it.
        starts: Where each of its regions begins, in rising order.
        stops: Where each ends.
        raw: All bytes from the first region on, with what lies between regions.
        races: Where given, races are looked for.
    """

    def __init__(
        self, name: str, starts: Array, stops: Array, raw: Array, races: Races | None
    ) -> None:
        self.name = name
        self._starts, self._stops = starts, stops
        self._races = races
        self._views = {width: raw[: len(raw) // width * width].view(f"u{width}")
                       for width in (1, 2, 4, 8)}  # fmt: skip

    def _located(self, addresses: Array, size: int, text: str) -> tuple[Array, Array]:
        """Return the region of each access and its offset there in bytes."""
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        stray = (region < 0) | (addresses + np.uint64(size) > self._stops[region])
        if stray.any():
            raise AccessError(
                f"{text}: {stray.sum()} of {len(addresses)} accesses are outside every tensor in "
                f"{self.name} memory, the first at {int(addresses[stray][0]):#x}"
            )
        off = addresses % np.uint64(size) != 0
        if off.any():
            raise AccessError(f"{text}: {off.sum()} accesses of {size} bytes are misaligned")
        return region, (addresses - self._starts[region]).astype(np.int64)

    def _elements(self, addresses: Array, width: int) -> tuple[Array, Array]:
        """Return the elements of this width there are, and which of them are at the addresses."""
        return self._views[width], (addresses - self._starts[0]).astype(np.int64) // width

    def load(
        self,
        addresses: Array,
        width: int,
        count: int,
        threads: Array,
        text: str,
        strong: str | None = None,
    ) -> list[Array]:
        """Load `count` elements of `width` bytes at each address, as an array each.

        Args:
            addresses: One for each thread.
            width: Bytes of an element.
            count: Elements at each address.
            threads: The threads that load.
            text: The instruction, for error messages.
            strong: The scope, "gpu" or "sys", of a load that may itself be what orders others.
        """
        region, offsets = self._located(addresses, width * count, text)
        if self._races:
            access = region, offsets, width * count, threads
            if strong is None:
                self._races.read(*access, text)
            else:
                self._races.strong_read(*access, strong == "sys", text)
        view, index = self._elements(addresses, width)
        return [view[index + k] for k in range(count)]

    def peek(self, addresses: Array, width: int) -> Array:
        """Return what is at addresses that have been loaded from."""
        view, index = self._elements(addresses, width)
        return view[index]

    def store(self, addresses: Array, values: list[Array], threads: Array, text: str) -> None:
        """Store the elements of `values` at each address."""
        width = values[0].dtype.itemsize
        region, offsets = self._located(addresses, width * len(values), text)
        view, index = self._elements(addresses, width)
        changed = np.zeros(len(index), bool)
        for k, value in enumerate(values):
            changed |= view[index + k] != value
        for k, value in enumerate(values):
            view[index + k] = value
        for k, value in enumerate(values):
            if (view[index + k] != value).any():
                raise AccessError(f"{text}: two threads store different values at one address")
        if self._races:
            self._races.write(region, offsets, width * len(values), threads, changed, text)

    def atomic(
        self,
        addresses: Array,
        update: Callable[[Array], Array],
        kind: Any,
        threads: Array,
        text: str,
        system: bool = False,
    ) -> Array:
        """Have `update` replace the values of numpy type `kind` at addresses of which no two are
        the same; return what they were.

        system: Whether it is atomic for all ranks, else for those of its thread's GPU.
        """
        size = np.dtype(kind).itemsize
        region, offsets = self._located(addresses, size, text)
        if self._races:
            self._races.atomic(region, offsets, size, threads, text, system)
        view, index = self._elements(addresses, size)
        old = view.view(kind)[index]
        view.view(kind)[index] = update(old)
        return old


# Not a set: tensors compare element by element.
_older: dict[int, weakref.ref[torch.Tensor]] = {}


def _tensors() -> list[torch.Tensor]:
    """Return the tensors that gc has not frozen and that have memory of their own.

    Subclasses are left out: compilers trace with them, and they hold no memory.

    Another thread may be filling a tuple, and fails if something else holds that tuple when it goes
    on. So the lists that gc returns are made, walked and dropped within one call into C, in which
    gc runs no finalizers; and no class is asked for its hash, which may be written in Python. The
    list is made twice, for the objects and for their types, the youngest generation last, so that
    what is new the second time follows everything else. The types run out first, which drops both.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        objects = chain.from_iterable(map(gc.get_objects, (2, 1, 0)))
        types = map(type, chain.from_iterable(map(gc.get_objects, (2, 1, 0))))
        plain = map({*map(id, PLAIN)}.__contains__, map(id, types))
        found: list[Any] = list(compress(chain(objects, repeat(None)), plain))
    finally:
        if collects:
            gc.enable()
    assert PLAIN.issuperset(map(type, found))
    return [tensor for tensor in found if not torch._is_functional_tensor(tensor)]


def freeze_tensors() -> None:
    """Remember all tensors there are and freeze every object, as gc.freeze does.

    A launch then looks only through what was made since.
    """
    for key in [key for key, reference in _older.items() if reference() is None]:
        del _older[key]
    _older.update((id(x), weakref.ref(x)) for x in _tensors())
    gc.freeze()
    atexit.register(gc.unfreeze)


def allocations() -> dict[int, int]:
    """Return the bytes of all CPU tensors' memory, by address."""
    found = dict[int, int]()
    older = (reference() for reference in _older.values())
    for tensor in chain(older, _tensors()):
        if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                # Of torch.func, around another tensor; such a one may outlive its function.
                continue
            if storage.nbytes() > 0:
                found[storage.data_ptr()] = storage.nbytes()
    return found


class GlobalMemory(Memory):
    """The memory that there is when this is made: `allocations`."""

    def __init__(self, clocks: Clocks | None) -> None:
        ranges = allocations()
        starts = np.array(sorted(ranges), np.uint64)
        sizes = np.array([ranges[int(start)] for start in starts], np.uint64)
        stops = starts + sizes
        # What is between tensors is never looked at.
        shape = (int(stops.max() - starts[0]),) if len(starts) else (0,)
        raw = SimpleNamespace(
            __array_interface__={
                "data": (int(starts[0]) if len(starts) else 0, False),
                "shape": shape,
                "typestr": "|u1",
                "version": 3,
            }
        )
        races = Races(sizes, clocks) if clocks else None
        super().__init__("global", starts, stops, np.asarray(raw), races)


class SharedMemory(Memory):
    """Shared memory of each block that runs: at least `size` bytes each, filled with 0xFF."""

    def __init__(self, size: int, blocks: int, clocks: Clocks | None) -> None:
        self.size = -(-max(size, 16) // 16) * 16
        # A block's addresses start at 0; the memory of the blocks lies end to end here.
        raw = np.full(self.size * blocks, 0xFF, np.uint8)
        sizes = np.array([len(raw)], np.uint64)
        races = Races(sizes, clocks) if clocks else None
        super().__init__("shared", np.zeros(1, np.uint64), sizes, raw, races)

    def address(self, slots: Array, offsets: Array, size: int, text: str) -> Array:
        """Return the address here of offsets into the memory of the blocks in `slots`."""
        if (offsets.astype(np.int64) + size > self.size).any():
            raise AccessError(f"{text}: beyond the {self.size} bytes of a block's shared memory")
        return slots.astype(np.uint64) * np.uint64(self.size) + offsets.astype(np.uint64)

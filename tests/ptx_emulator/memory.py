"""Global and shared memory as the emulated threads see them: every access is checked."""

from __future__ import annotations

import atexit
import ctypes
import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from typing import Any

import numpy as np
import torch

from kernels.validation import PLAIN
from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.races import Clocks, Races

SECTOR = 32


class AccessError(RuntimeError):
    """An access outside every tensor or off its alignment, or two values stored in one place."""


@dataclass
class Traffic:
    """What one launch asked of global memory.

    loads, stores: requests of warps, by bytes a thread. load_sectors, store_sectors: the sectors of
    32 bytes that those touched, each once a request. distinct_loaded, distinct_stored: bytes of all
    sectors touched, each once in the launch: what must move if caches hold everything in between.
    """

    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    load_sectors: Counter[int] = field(default_factory=Counter)
    store_sectors: Counter[int] = field(default_factory=Counter)
    _loaded: list[Array] = field(default_factory=list, repr=False)
    _stored: list[Array] = field(default_factory=list, repr=False)

    def note(self, addresses: Array, warps: Array, size: int, store: bool) -> None:
        """One instruction: the addresses its threads ask for and the warps they are of."""
        first, last = addresses // SECTOR, (addresses + size - 1) // SECTOR
        sectors = first if size <= SECTOR and (first == last).all() else np.r_[first, last]
        lanes = warps if sectors is first else np.r_[warps, warps]
        # Sectors of a process fit in 43 bits.
        touched = np.unique(sectors.astype(np.int64) | lanes.astype(np.int64) << 43)
        requests = len(np.unique(warps))
        distinct = np.unique(sectors)
        if store:
            self.stores[size] += requests
            self.store_sectors[size] += len(touched)
            self._stored.append(distinct)
        else:
            self.loads[size] += requests
            self.load_sectors[size] += len(touched)
            self._loaded.append(distinct)

    @property
    def distinct_loaded(self) -> int:
        return _distinct(self._loaded)

    @property
    def distinct_stored(self) -> int:
        return _distinct(self._stored)


def _distinct(parts: list[Array]) -> int:
    return SECTOR * len(np.unique(np.concatenate(parts))) if parts else 0


class Memory:
    """One address space. Elements are moved as unsigned integers of 2, 4 or 8 bytes."""

    def __init__(self, name: str, starts: Array, stops: Array, races: Races | None) -> None:
        self.name = name
        self._starts, self._stops = starts, stops
        self._races = races
        self._views: dict[tuple[int, int], Array] = {}

    def _bytes(self, region: int) -> Array:
        raise NotImplementedError

    def _view(self, region: int, width: int) -> Array:
        view = self._views.get((region, width))
        if view is None:
            raw = self._bytes(region)
            view = raw[: len(raw) // width * width].view(f"u{width}")
            self._views[region, width] = view
        return view

    def _places(self, addresses: Array, size: int, text: str) -> tuple[Array, Array]:
        """(region, bytes into it) of each access."""
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

    def load(
        self,
        addresses: Array,
        width: int,
        count: int,
        threads: Array,
        text: str,
        racing: bool = True,
    ) -> list[Array]:
        """`count` elements of `width` bytes at each address, an array for each of them.

        racing: False for a load that is itself what orders others.
        """
        region, places = self._places(addresses, width * count, text)
        results = [np.empty(len(addresses), f"u{width}") for _ in range(count)]
        for one in np.unique(region):
            here = slice(None) if region[0] == one and (region == one).all() else region == one
            view, index = self._view(int(one), width), places[here] // width
            for k, result in enumerate(results):
                result[here] = view[index + k]
            if self._races and racing:
                self._races.read(int(one), places[here], width * count, threads[here], text)
        return results

    def store(self, addresses: Array, values: list[Array], threads: Array, text: str) -> None:
        """The elements of `values` at each address."""
        width = values[0].dtype.itemsize
        region, places = self._places(addresses, width * len(values), text)
        for one in np.unique(region):
            here = slice(None) if region[0] == one and (region == one).all() else region == one
            view, index = self._view(int(one), width), places[here] // width
            changed = np.zeros(len(index), bool)
            for k, value in enumerate(values):
                changed |= view[index + k] != value[here]
            for k, value in enumerate(values):
                view[index + k] = value[here]
            for k, value in enumerate(values):
                if (view[index + k] != value[here]).any():
                    raise AccessError(f"{text}: two threads store different values in one place")
            if self._races:
                self._races.write(
                    int(one), places[here], width * len(values), threads[here], changed, text
                )

    def exchange_add(self, address: int, value: int, thread: int, text: str) -> int:
        """The 8 bytes there, which become their sum with `value`, modulo 2**64."""
        (region,), places = self._places(np.array([address], np.uint64), 8, text)
        view, index = self._view(int(region), 8), int(places[0]) // 8
        if self._races:
            self._races.count(int(region), places, 8, np.array([thread]), text)
        old = int(view[index])
        view[index] = (old + value) % 2**64
        return old


# Not a set: tensors compare element by element.
_older: dict[int, weakref.ref[torch.Tensor]] = {}


def _tensors() -> list[torch.Tensor]:
    """Those that gc has not set aside, with memory of their own: no subclasses, which compilers
    trace with.

    Another thread may be filling a tuple, and fails if something else holds that when it goes on.
    So what gc returns is made, gone through and dropped in one call of C's, within which gc runs no
    finalizers, and no class is asked for its hash, which some have in Python. It is made twice, for
    values and types, the youngest last: what is new the second time comes behind all else. The
    types end first, so that both are dropped.
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
    """Note all tensors there are and set them aside with every other object, as gc.freeze does:
    a launch looks through those made since."""
    for gone in [key for key, reference in _older.items() if reference() is None]:
        del _older[gone]
    _older.update((id(x), weakref.ref(x)) for x in _tensors())
    gc.freeze()
    atexit.register(gc.unfreeze)


class GlobalMemory(Memory):
    """All memory of CPU tensors that live when it is made."""

    def __init__(self, clocks: Clocks | None) -> None:
        ranges = dict[int, int]()
        older = (reference() for reference in _older.values())
        for tensor in chain(older, _tensors()):
            if (
                tensor is not None
                and tensor.device.type == "cpu"
                and tensor.layout is torch.strided
            ):
                storage = tensor.untyped_storage()
                if storage.nbytes() > 0:
                    ranges[storage.data_ptr()] = storage.nbytes()
        starts = sorted(ranges)
        self._raw = [
            np.ctypeslib.as_array((ctypes.c_ubyte * ranges[start]).from_address(start))
            for start in starts
        ]
        sizes = [ranges[start] for start in starts]
        races = Races(sizes, clocks) if clocks else None
        first = np.array(starts, np.uint64)
        super().__init__("global", first, first + np.array(sizes, np.uint64), races)

    def _bytes(self, region: int) -> Array:
        return self._raw[region]


class SharedMemory(Memory):
    """That of each block that runs, `size` bytes in a multiple of 16, poisoned."""

    def __init__(self, size: int, blocks: int, clocks: Clocks | None) -> None:
        self.size = -(-max(size, 16) // 16) * 16
        # Addresses of one block's shared memory start at 0; the blocks' lie behind each other.
        self._raw = np.full(self.size * blocks, 0xFF, np.uint8)
        starts = np.arange(blocks, dtype=np.uint64) * np.uint64(self.size)
        races = Races([len(self._raw)], clocks) if clocks else None
        super().__init__("shared", starts[:1], np.array([len(self._raw)], np.uint64), races)

    def _bytes(self, region: int) -> Array:
        return self._raw

    def address(self, slots: Array, offsets: Array, size: int, text: str) -> Array:
        """Of offsets into the memory of the blocks in `slots`."""
        if (offsets.astype(np.int64) + size > self.size).any():
            raise AccessError(f"{text}: beyond the {self.size} bytes of shared memory")
        return slots.astype(np.uint64) * np.uint64(self.size) + offsets.astype(np.uint64)

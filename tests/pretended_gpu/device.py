"""The pretended device: its clock, streams, captures and launches, behind the pretended libcuda.

All work is done when it is put on a stream, by the thread that puts it there. What a missing event
or synchronization would break is not seen here: tests/fakes/fake_cuda.py is for that.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.pretended_gpu import build
from tests.ptx_emulator.launches import Started
from tests.ptx_emulator.machine import launch as emulate
from tests.ptx_emulator.parse import Program, parse
from tests.ptx_emulator.streams import launch_together

# CUDA's numbers, with the values of an H200.
ATTRIBUTES = {
    10: 32,  # threads of a warp
    12: 65536,  # registers of a block
    13: 1_980_000,  # kHz
    16: 132,  # multiprocessors
    36: 3_201_000,  # kHz of the memory
    37: 6144,  # bits of the memory's bus
    38: 60 << 20,  # bytes of L2
    75: 9,
    76: 0,
    81: 233_472,  # bytes of shared memory of a multiprocessor
    95: 1,  # cooperative launches
    97: 232_448,  # bytes of shared memory of a block, where it asks for them
}
NAME, MEMORY, CYCLES = "NVIDIA Pretended H200", 141 << 30, 1_755_000_000
COOPERATIVE, DEPENDENT = 2, 6
# Kernels whose launches wait for those of other ranks.
NODE = {"_one_shot_kernel", "_two_shot_kernel", "_adasum_kernel"}
_ATTRIBUTE_NAMES = {COOPERATIVE: "cooperative", DEPENDENT: "dependent"}
# Seconds that everything takes on the pretended device, beside what sleeps.
STEP = 10e-6
_ILLEGAL_ADDRESS, _TOO_LARGE = 700, 720
_parse = cache(parse)


class PretendError(RuntimeError):
    """A launch is not what the launcher's own tables say."""


class Bound(NamedTuple):
    """What `Kernel.bind` was given and `Launch` was called with, as a launch should say it."""

    name: str
    grid: int
    threads: int
    attributes: frozenset[str]
    arguments: tuple[int, ...]


@dataclass
class Launched:
    """One launch that reached the driver; how: "emulated", or "counted" where others compute."""

    name: str
    grid: int
    threads: int
    shared: int
    stream: int
    attributes: frozenset[str]
    arguments: tuple[int, ...]
    how: str
    captured: bool


@dataclass
class Graph:
    """What was put on the streams while it was captured."""

    work: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    # Made in the capture: the graph's own, as long as it lives.
    memory: list[Any] = field(default_factory=list)


class Device:
    """The one device of this process.

    Attributes:
        clock: Its seconds so far.
        launches: Those that came, in captures, too; not those of replays.
        emulated: Whether launches run in the emulator; else they are counted.
        allocations: Bytes of its memory that is in use, by address.
        dtypes: Of the tensors that kernels were bound to.
        resident: Blocks that the emulator runs at once, in a launch that is not cooperative.
        ranks: How many share it, of which a node's launches run together, always in the emulator.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.launches: list[Launched] = []
        self.emulated = True
        self.resident = 64
        self.ranks = 2
        self._coming: list[Started] = []
        self._came = threading.Condition()
        self.allocations: dict[int, int] = {}
        self.graph: Graph | None = None
        self.dtypes: set[str] = set()
        self.handles = itertools.count(16)
        self.expected = threading.local()
        # Each with the bytes of its parameters.
        self._functions: dict[int, tuple[Program, list[int]]] = {}
        self._seed = itertools.count(1)
        self._turn = threading.RLock()
        self.library = ctypes.CDLL(str(build.libcuda()), mode=ctypes.RTLD_GLOBAL)
        # Kept, as C calls them.
        self._callbacks = (_LAUNCH(self._launch), ctypes.CFUNCTYPE(*[ctypes.c_int] * 2)(_attribute))
        self.library.pretend_answer_by(*self._callbacks)

    def put(self, work: Callable[[], object], seconds: float = STEP) -> None:
        """Do work now, or at each replay of the graph that is captured."""
        if self.graph is not None:
            self.graph.work.append((seconds, work))
            return
        self.clock += seconds
        work()

    def replay(self, graph: Graph) -> None:
        for seconds, work in graph.work:
            self.put(work, seconds)

    def begin_capture(self) -> None:
        self.graph = Graph()
        self.library.pretend_capturing(1)

    def end_capture(self) -> Graph:
        found, self.graph = self.graph, None
        self.library.pretend_capturing(0)
        assert found is not None
        return found

    def allocate(self, size: int) -> Any:
        """Return ctypes' bytes in the device's memory, NaN where floats are read."""
        address = ctypes.c_uint64()
        assert self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        ctypes.memset(address.value, 0xFF, size)
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        self.allocations[address.value] = size
        weakref.finalize(memory, self._free, address.value).atexit = False
        if self.graph is not None:
            self.graph.memory.append(memory)
        return memory

    def _free(self, address: int) -> None:
        del self.allocations[address]
        self.library.cuMemFree_v2(ctypes.c_uint64(address))

    def loaded(
        self, module: int, function: int, name: str, files: dict[str, str], key: str
    ) -> None:
        """As Triton's hook: note which PTX a function's machine code was made of."""
        path = next(path for file, path in files.items() if file.endswith(".ptx"))
        text = Path(path).read_text()
        sizes = [
            int(bits) // 8 for bits in re.findall(r"\.param\s+\.[ub](\d+)[^,)]*?_param_", text)
        ]
        program = _parse(text)
        assert len(sizes) == len(program.parameters), name
        self._functions[function] = program, sizes

    def _launch(
        self, function: int, dims: Any, stream: int, count: int, attributes: Any, parameters: Any
    ) -> int:
        try:
            return self._run(function, dims[:7], stream, attributes[: 2 * count], parameters)
        except Exception as error:  # noqa: BLE001 - C takes none: it becomes the launch's error
            self.library.pretend_message(f"{type(error).__name__}: {error}".encode()[:1000])
            return _ILLEGAL_ADDRESS

    def _run(
        self, function: int, dims: Sequence[int], stream: int, given: Sequence[int], parameters: Any
    ) -> int:
        program, sizes = self._functions[function]
        values = []
        for i, size in enumerate(sizes):
            raw = ctypes.string_at(parameters[i], size)
            values.append(int.from_bytes(raw, "little", signed=True))
        names = frozenset(
            _ATTRIBUTE_NAMES.get(number, str(number))
            for number, value in zip(given[::2], given[1::2], strict=True)
            if value
        )
        how = "emulated" if self.emulated else "counted"
        done = Launched(
            *(program.name, dims[0], dims[3], dims[6], stream, names, tuple(values), how),
            captured=self.graph is not None,
        )
        if dims[1:3] != [1, 1] or dims[4:6] != [1, 1]:
            raise PretendError(f"{program.name}: a grid or block of {dims[:6]}")
        self.launches.append(done)
        compare(done, getattr(self.expected, "bound", None))
        if "cooperative" in names and dims[0] > ATTRIBUTES[16] * (2048 // dims[3]):
            self.library.pretend_message(b"too many blocks in cooperative launch")
            return _TOO_LARGE
        if program.name in NODE:
            self.put(lambda: self._meet(program, done))
        elif self.emulated:
            self.put(lambda: self._emulate(program, done))
        else:
            self.put(lambda: None)
        return 0

    def _meet(self, program: Program, done: Launched) -> None:
        """Run a node's launches when the last rank's has come.

        A rank that is a thread of its own waits for that; others are streams of the main thread.
        """
        with self._came:
            mine = self._coming
            place = len(mine)
            mine.append(Started(program, done.grid, done.arguments, done.shared, rank=place))
            if len(mine) == self.ranks:
                self._coming = []
                launch_together(mine, races=False)
                self._came.notify_all()
            elif threading.current_thread() is not threading.main_thread():
                assert self._came.wait_for(lambda: self._coming is not mine, 60.0)

    def _emulate(self, program: Program, done: Launched) -> None:
        with self._turn:
            emulate(
                program,
                done.grid,
                done.arguments,
                done.shared,
                resident=done.grid if "cooperative" in done.attributes else self.resident,
                seed=next(self._seed),
                races=False,
                dependent="dependent" in done.attributes,
            )


def compare(done: Launched, bound: Bound | None) -> None:
    """Raise where a launch is not the one that `Kernel.bind` was asked for."""
    if bound is None or bound.name != done.name:
        return
    for field_name in ("grid", "threads", "attributes"):
        got, want = getattr(done, field_name), getattr(bound, field_name)
        if got != want:
            raise PretendError(f"{done.name}: {field_name} {got}, asked for was {want}")
    # Behind them Triton passes two kinds of scratch memory, which these kernels do not use.
    count = len(bound.arguments)
    if done.arguments[:count] != bound.arguments or any(done.arguments[count:]):
        raise PretendError(f"{done.name}: arguments {done.arguments}, given were {bound.arguments}")


def _attribute(number: int) -> int:
    return ATTRIBUTES.get(number, -1)


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint64,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)

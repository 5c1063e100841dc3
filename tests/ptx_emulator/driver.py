"""Send Triton's launches to the emulator: public functions run compiled code on CPU tensors.

Everything before the launch is as on a GPU: what Triton specialises on, what it compiles for which
architecture, and the arguments it passes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

from torch import Tensor

from kernels.gpu import launcher
from tests.ptx_emulator.launches import Started
from tests.ptx_emulator.machine import launch
from tests.ptx_emulator.memory import Traffic, freeze_tensors
from tests.ptx_emulator.parse import Program, parse
from tests.ptx_emulator.streams import launch_together

_parse = cache(parse)
# At most four programs of the one-launch kernel are resident, so that they take turns.
SMALL_CHIP = launcher.Chip(multiprocessors=1, cache=50 << 20)

# Compiled kernels outlive the emulator that they were compiled for.
_current: Emulator | None = None


@dataclass
class Launched:
    """One launch: the kernel's name, its grid and its memory traffic, if that was counted."""

    name: str
    grid: int
    traffic: Traffic | None


@dataclass
class Emulator:
    """How launches run, and what they did.

    Attributes:
        resident: Blocks that run at once, in a launch that is not cooperative.
        seed: Of the order of blocks and threads; each launch takes the next one.
        races: Whether to look for data races.
        traffic: Whether to count memory traffic.
        launches: The launches so far.
        rank: Whose the next launch is, of those that run together.
        node: Of which node that rank is.
    """

    resident: int
    seed: int
    races: bool
    traffic: bool
    launches: list[Launched] = field(default_factory=list)
    rank: int = 0
    node: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _together: list[Started] | None = None
    # Of ranks without a launch so far.
    _delays: dict[int, int] = field(default_factory=dict)
    _held: list[Sequence[Any]] = field(default_factory=list)

    @contextmanager
    def together(self, delays: Sequence[int] = ()) -> Iterator[None]:
        """Run the launches made inside at once, at the end, those of each `rank` in order.

        Args:
            delays: Nanoseconds after which each rank begins, of which a basic block takes one.
        """
        self._together, self._delays = [], dict(enumerate(delays))
        try:
            yield
            self.seed += 1
            launch_together(self._together, seed=self.seed, races=self.races)
        finally:
            self._together, self._delays, self.rank, self.node = None, {}, 0, 0
            self._held.clear()

    def run(
        self,
        program: Program,
        grid: int,
        arguments: Sequence[int],
        metadata: Any,
        held: Sequence[Any],
    ) -> None:
        """Run one launch; those of several threads take turns.

        held: What the arguments are addresses of, kept until it has run.
        """
        with self._turn:
            traffic = Traffic() if self.traffic else None
            if self._together is not None:
                delay = self._delays.pop(self.rank, 0)
                own = self.rank, self.node, delay, traffic
                self._together.append(Started(program, grid, arguments, metadata.shared, *own))
                self._held.append(held)
                self.launches.append(Launched(program.name, grid, traffic))
                return
            self.seed += 1
            launch(
                program,
                grid,
                arguments,
                metadata.shared,
                resident=grid if metadata.launch_cooperative_grid else self.resident,
                seed=self.seed,
                races=self.races,
                traffic=traffic,
                dependent=metadata.launch_pdl,
            )
            self.launches.append(Launched(program.name, grid, traffic))


class _Driver:
    """The part of Triton's driver that is used before a launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Keep kernels apart that are compiled for other architectures or for a GPU of this machine.
        return -self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _argument(value: object) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else int(value)  # type: ignore[call-overload]


def _passed(values: Sequence[Any], kinds: Sequence[Any]) -> Iterator[int]:
    """Yield what reaches the kernel: no constants, and of a tuple what is in it."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _passed(value, kind)
        elif kind != "constexpr":
            yield _argument(value)


@contextmanager
def emulated(
    capability: int = 90,
    *,
    resident: int = 64,
    chip: launcher.Chip | None = None,
    seed: int = 0,
    races: bool = True,
    traffic: bool = False,
) -> Iterator[Emulator]:
    """Run the Triton kernels on CPU tensors, compiled for sm_`capability` and emulated.

    Args:
        capability: Compute capability times ten.
        resident: Blocks that run at once, in a launch that is not cooperative.
        chip: The GPU whose size decides between one cooperative launch and two: SMALL_CHIP, with
            all that its capability brings, if None.
        seed: Of the order of blocks and threads.
        races: Whether to look for data races.
        traffic: Whether to count memory traffic.

    Yields:
        The emulator, which lists the launches.

    Raises:
        RuntimeError: This process interprets kernels.
    """
    global _current
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("an interpreted kernel is not compiled: unset TRITON_INTERPRET")
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    emulator = Emulator(resident, seed, races, traffic)
    chip = chip or SMALL_CHIP._replace(dependent_launch=capability >= 90, capability=capability)

    def handles(self: Any) -> None:
        if self._run is not None:
            return
        metadata = self.metadata
        program = _parse(self.asm["ptx"])
        signature = list(self.src.signature.values())

        def run(x: int, y: int, z: int, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            _, _, _, description, enter, leave = rest[: -len(signature)]
            passed = list(_passed(rest[-len(signature) :], signature))
            # Pointers to two kinds of scratch memory that these kernels do not use.
            passed += [0] * (len(program.parameters) - len(passed))
            assert _current is not None
            if enter is not None:
                enter(description)
            _current.run(program, x, passed, metadata, rest)
            if leave is not None:
                leave(description)

        self._run, self.function = run, None

    freeze_tensors()
    outer, _current = _current, emulator
    with (
        mock.patch.object(launcher, "emulated", True),
        mock.patch.object(launcher, "chip_of", return_value=chip),
        mock.patch.object(CompiledKernel, "_init_handles", handles),
        mock.patch.object(driver, "_active", _Driver(capability)),
    ):
        try:
            yield emulator
        finally:
            _current = outer

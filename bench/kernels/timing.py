"""How everything is timed: all functions of a row in turns, round by round.

What drifts (clocks, other users of the machine) then reaches all of them alike. Times are seconds
of one call.

CUDA: two device events around the call. Before it the L2 cache is filled with other data, and the
device is kept busy for longer than the host needs to issue the call, so that the host's time is not
in the figure; `host_seconds` measures that alone. Small calls are also replayed from a CUDA graph.
`empty_launch` shows what the method itself costs. Rows by wall clock are timed from before the call
to the device's end of it, with nothing else under way.

CPU: perf_counter around a loop of calls that lasts at least half a millisecond, after calls that
are not timed, so that what fits in a cache is there.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Call = Callable[[], Any]

_CPU_LOOP = 5e-4
# (seconds, untimed calls before a sample of a row whose fastest call is shorter than that): a copy
# of 4 MiB took four calls to reach its time in a loop. All calls of a row get as many, else one
# slightly slower than a limit would find less in the caches. Longer calls move more than they hold.
_CPU_WARM = ((1e-3, 4), (1e-2, 1))
# The host's time for a call may be off by this factor, since the calls before it empty its caches
# (1.5 was too little: on an H200 a call of 104 us took more than 300); issuing two events takes the
# extra.
_HOST_FACTOR, _HOST_EXTRA = 4.0, 3e-5


@dataclass(frozen=True)
class Limits:
    """Rounds last until `seconds` have passed; there are at least `fewest` and at most `most`."""

    seconds: float
    fewest: int
    most: int


LIMITS = {"cuda": Limits(0.3, 11, 101), "cpu": Limits(0.5, 5, 61)}[DEVICE]


@dataclass(frozen=True)
class Times:
    """Seconds of one call over the rounds: median and quartiles."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


def time_together(
    calls: Mapping[str, Call],
    hosts: Mapping[str, float],
    limits: Limits = LIMITS,
    wall: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of each call by name, one sample for each round.

    On CUDA only: hosts, what `host_seconds` gave for each call, and wall, whether the host's time
    counts; on a CPU it always does.
    """
    if DEVICE != "cuda":
        sample = _cpu_sampler(calls)
    else:
        sample = _wall_sampler(calls) if wall else _cuda_sampler(calls, hosts)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with _no_collection():
        begin = time.perf_counter()
        for done in range(limits.most):
            if done >= limits.fewest and time.perf_counter() - begin > limits.seconds:
                break
            # What ran before a call decides what it finds in the caches, so the order is random.
            for name in random.Random(done).sample([*calls], len(calls)):
                samples[name].append(sample(name))
    return samples


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _looped(call: Call, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _cpu_sampler(calls: Mapping[str, Call]) -> Callable[[str], float]:
    once = {name: min(_looped(call, 1) for _ in range(3)) for name, call in calls.items()}
    fastest = min(once.values())
    warming = next((count for limit, count in _CPU_WARM if fastest < limit), 0)

    def sample(name: str) -> float:
        for _ in range(warming):
            calls[name]()
        return _looped(calls[name], max(1, int(_CPU_LOOP / once[name])))

    return sample


def _cuda_sampler(calls: Mapping[str, Call], hosts: Mapping[str, float]) -> Callable[[str], float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(name: str) -> float:
        _flush()
        seconds = _HOST_FACTOR * hosts[name] + _HOST_EXTRA
        torch.cuda._sleep(int(seconds * _cycles_per_second()))
        start.record()
        calls[name]()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    return sample


def _wall_sampler(calls: Mapping[str, Call]) -> Callable[[str], float]:
    def sample(name: str) -> float:
        _flush()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        calls[name]()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    return sample


@functools.cache
def _flush_buffers() -> tuple[Tensor, Tensor]:
    cached = torch.cuda.get_device_properties(0).L2_cache_size
    return torch.ones(cached, dtype=torch.float32, device="cuda"), torch.empty((), device="cuda")


def _flush() -> None:
    """Read four times what L2 holds, which fills it with lines that need no writing back."""
    source, target = _flush_buffers()
    torch.sum(source, 0, out=target)


@functools.cache
def _cycles_per_second() -> float:
    """Return the cycles of the device's clock once it has left its idle state."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    for _ in range(10):
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
    stop.synchronize()
    return cycles / (start.elapsed_time(stop) / 1e3)


def host_seconds(call: Call) -> float:
    """Return the median host time of a call that waits for nothing. CUDA only."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples = []
    with _no_collection():
        for _ in range(20):
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(samples)


def empty_launch() -> None:
    """Launch a kernel that does nothing: it spins for no cycles."""
    torch.cuda._sleep(0)


def captured(call: Call) -> tuple[Call, Any]:
    """Return a CUDA graph's replay of `call` and the result that each replay overwrites."""
    caller, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    caller.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError:
        # After a failed capture torch leaves its stream current.
        torch.cuda.set_stream(caller)
        raise
    return graph.replay, result

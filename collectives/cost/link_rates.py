"""The numbers of the α-β-γ model: what a message and a reduction cost on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from collectives.schedules.algorithm import Floats


class Rate(NamedTuple):
    """The time of a message or a reduction.

    Attributes:
        alpha: Seconds for each.
        beta: Seconds a byte.
        knee: Bytes beyond which each takes another time; on a CPU, what fits in the caches.
        far: Seconds a byte beyond the knee.
    """

    alpha: float
    beta: float
    knee: float = math.inf
    far: float = 0.0

    def seconds(self, count: Floats, nbytes: Floats) -> Floats:
        """Return the time of `count`, with `nbytes` in all."""
        near = self.alpha * count + self.beta * np.minimum(nbytes, self.knee)
        return near + self.far * np.maximum(nbytes - self.knee, 0.0)

    def scaled(self, factor: float) -> Rate:
        """Return the rate that takes `factor` times as long."""
        return Rate(self.alpha * factor, self.beta * factor, self.knee, self.far * factor)


@dataclass(frozen=True)
class LinkRates:
    """How fast a machine moves bytes between ranks, and reduces them.

    Attributes:
        intra: What a rank sends to, or receives from, a peer on its node.
        inter: The same with a peer on another node.
        sum: One reduction on a rank, by the bytes that it has received for it.
        adasum: The same by Adasum.
        nic: Seconds a byte of the network adapter that all ranks of a node share, each way; None
            where every rank has its own.
        call: Seconds of a collective beside its steps.
        host: Seconds that the host spends on a step before the device begins it. Nothing on a CPU,
            where it is a part of alpha.

    Raises:
        ValueError: A number is negative or not finite.
    """

    intra: Rate
    inter: Rate
    sum: Rate
    adasum: Rate
    nic: float | None = None
    call: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = (value.alpha, value.beta, value.far) if isinstance(value, Rate) else (value,)
            if any(n is not None and not (n >= 0 and math.isfinite(n)) for n in numbers):
                raise ValueError(
                    f"{field.name} must be finite seconds and not negative, got {value}"
                )
            if isinstance(value, Rate) and not value.knee > 0:
                raise ValueError(f"{field.name} must have a knee of more than 0 bytes, got {value}")


ASSUMED = LinkRates(
    intra=Rate(3.4e-6, 1 / 450e9),
    inter=Rate(14e-6, 1 / 50e9),
    sum=Rate(3e-6, 3 / 3.35e12),
    adasum=Rate(7.5e-6, 5.7 / 3.35e12),
    host=60e-6,
)
"""Assumptions, not measurements: nodes of H100 GPUs, each with a 400 Gb/s adapter of its own.

alpha: the latencies that NCCL's tuning tables give a hop of a ring over NVLink and over the network
(protocol Simple). beta: the makers' figures, NVLink 4 at 450 GB/s each way and 400 Gb/s. sum: a
kernel launch of 3 µs, and two reads and a write at the 3.35 TB/s of the data sheet. adasum: five
units of such traffic in two launches, 1.14 times as long a byte as a sum's: on an H200, the one GPU
that was measured, 1.12 to 1.18 of pairs of 1 GiB and of 8 slices of 128 MiB (bench/results). host:
what one exchange through NCCL takes of the calling thread's processor time over stand-ins for CUDA
and NCCL (tests/fakes; a loaded 2-core EPYC), without a driver's part and NCCL's own thread.
"""

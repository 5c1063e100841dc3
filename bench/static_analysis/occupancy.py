"""The programs that fit on one multiprocessor (SM), and the bytes in flight that it needs."""

from __future__ import annotations

from typing import NamedTuple

REGISTERS = 65536
SCHEDULERS = 4
REGISTER_UNIT = 256
SHARED_RESERVED = 1024
SHARED_UNIT = 128

# Assumption, not a measurement: from a load's issue to its data, in nanoseconds, with the memory
# near its limit. NVIDIA's talk "CUDA Techniques to Maximize Memory Bandwidth and Hide Latency"
# (GTC 2025, S72683) asks for more than 32 KiB in flight per SM on Hopper and 40 KiB on Blackwell;
# by Little's law with the figures below that is 1300 and 760 ns.
LATENCY_NS = 1000.0


class Architecture(NamedTuple):
    """A compute capability, and a GPU of it (`part`) whose data sheet gives the figures.

    shared: bytes of shared memory per SM; gigabytes_per_second: the memory's bandwidth; gigahertz:
    the clock that it is assumed to sustain; threads, programs: the most per SM.
    """

    part: str
    shared: int
    sms: int
    gigabytes_per_second: float
    gigahertz: float
    threads: int = 2048
    programs: int = 32

    @property
    def bytes_needed(self) -> float:
        """Little's law: bytes in flight per SM = bandwidth * latency / SMs."""
        return self.gigabytes_per_second * LATENCY_NS / self.sms

    @property
    def instructions_per_byte(self) -> float:
        """Thread instructions that an SM can issue while it moves one byte.

        Each scheduler issues one warp instruction, for 32 threads, per cycle.
        """
        return 32 * SCHEDULERS * self.gigahertz / (self.gigabytes_per_second / self.sms)


ARCHITECTURES = {
    80: Architecture("A100 SXM 80 GB", 164 << 10, 108, 2039.0, 1.41),
    # The H100 is the same chip with memory of 3350 GB/s: 24.8 KiB in flight will do, not 35.5.
    90: Architecture("H200 SXM", 228 << 10, 132, 4800.0, 1.755),
    100: Architecture("B200", 228 << 10, 148, 8000.0, 1.85),
    120: Architecture("RTX PRO 6000", 100 << 10, 188, 1792.0, 2.4, threads=1536, programs=24),
}


class Residency(NamedTuple):
    """The number of programs resident on one SM, and the resource that limits it."""

    programs: int
    limit: str


def residency(capability: int, registers: int, warps: int, shared: int) -> Residency:
    """Return how many programs of this size are resident on one SM: the least of four limits.

      threads:   the SM's threads // (32 * warps)
      slots:     the SM's limit of programs
      registers: each of the four schedulers has 16384, and a warp takes 32 * registers, rounded up
                 to a multiple of 256; this gives the SM's warps, which are divided by the
                 program's warps, rounded up to a multiple of 4
      shared:    the SM's bytes // (shared + 1024 for the system, rounded up to 128)

    Source: CUDA C++ Programming Guide, "Compute Capabilities", "Technical Specifications per
    Compute Capability"; the allocation units are from the toolkit's cuda_occupancy.h, and equal for
    all of these architectures.
    """
    chip = ARCHITECTURES[capability]
    a_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = SCHEDULERS * (REGISTERS // SCHEDULERS // a_warp)
    a_program = -(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    limits = {
        "registers": warps_by_registers // (-(-warps // SCHEDULERS) * SCHEDULERS),
        "threads": chip.threads // (32 * warps),
        "shared": chip.shared // a_program,
        "slots": chip.programs,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Residency(limits[limit], limit)

"""A stand-in for the module `pynvml` (nvidia-ml-py): GPUs, their NVLinks and where they sit.

What it cannot show: that NVML answers as modelled here. The names and arguments are those of
nvidia-ml-py 13.615 (test_nvlink.py compares them where it is installed).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

SINGLE, HOSTBRIDGE, NODE, SYSTEM = 10, 30, 40, 50

# The NVLinks of a DGX-1 with 8 V100s, as `nvidia-smi topo -m` prints them (NV1, NV2; SYS is 0).
DGX1 = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


class NVMLError(Exception):
    """As nvidia-ml-py's: every code is a class of its own."""


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class Part(NamedTuple):
    """The handle of a MIG part of GPU `gpu`."""

    gpu: int


def uuid(gpu: int, part: int = 0) -> str:
    """A GPU's UUID, or that of a MIG part of it, as torch gives it."""
    return f"{gpu:08}-{part:04}-0000-0000-000000000000"


class FakeNvml:
    """GPUs by number, which is also their handle.

    links: NVLinks between each two GPUs. switched: each GPU's links to a switch. levels: NVML's
    topology levels between each two. parts: MIG parts of each GPU; GPUs that have any are not
    found by their own UUID. failing: what the function of this name raises.
    """

    NVMLError = NVMLError
    NVMLError_InvalidArgument = NVMLError_InvalidArgument
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_NVLINK_DEVICE_TYPE_UNKNOWN = 255

    def __init__(
        self,
        links: Sequence[Sequence[int]],
        levels: Sequence[Sequence[int]] | None = None,
        *,
        switched: int = 0,
        parts: int = 0,
        failing: dict[str, type[NVMLError]] | None = None,
    ) -> None:
        self.size = len(links)
        self.failing = failing or {}
        self.opened = self.closed = 0
        self._levels = levels or [[SYSTEM] * self.size] * self.size
        self._parts = parts
        # The first of every GPU's links is down, between each even one and the next.
        self._ends: list[list[int | str]] = [[gpu ^ 1] for gpu in range(self.size)]
        for gpu, row in enumerate(links):
            for peer, count in enumerate(row):
                self._ends[gpu] += [peer] * count
            self._ends[gpu] += ["switch"] * switched

    def _called(self, name: str) -> None:
        if name in self.failing:
            raise self.failing[name]
        if name != "nvmlInit" and self.opened == self.closed:
            raise NVMLError_Uninitialized

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.closed += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._called("nvmlDeviceGetHandleByUUID")
        kind, _, rest = uuid.partition("-")
        gpu, part = int(rest[:8]), int(rest[9:13])
        if gpu >= self.size or kind != ("MIG" if self._parts else "GPU") or part > self._parts:
            raise NVMLError_NotFound
        return Part(gpu) if self._parts else gpu

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Part) -> int:
        self._called("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        return migDevice.gpu

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        self._called("nvmlDeviceGetPciInfo")
        return SimpleNamespace(busId=f"00000000:{0x0A + handle:02X}:00.0")

    def _end(self, device: int, link: int) -> int | str:
        if len(self._ends[device]) == 1:
            raise NVMLError_NotSupported
        if link >= len(self._ends[device]):
            raise NVMLError_InvalidArgument
        return self._ends[device][link]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        self._called("nvmlDeviceGetNvLinkState")
        self._end(device, link)
        return int(link > 0)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        self._called("nvmlDeviceGetNvLinkRemoteDeviceType")
        return 2 if self._end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        self._called("nvmlDeviceGetNvLinkRemotePciInfo")
        end = self._end(device, link)
        # NVML writes the same bus in either case of letters.
        bus = f"00000000:{0x0A + end:02x}:00.0" if isinstance(end, int) else "ffffffff:ff:ff.f"
        return SimpleNamespace(busId=bus)

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: int, device2: int) -> int:
        self._called("nvmlDeviceGetTopologyCommonAncestor")
        if device1 == device2:
            raise NVMLError_InvalidArgument
        return self._levels[device1][device2]

"""How fast the GPUs of one host reach each other, as far as NVML tells (the package nvidia-ml-py).

GPUs are named by UUID, as torch and NVML both know it: indices differ between the two, and with
CUDA_VISIBLE_DEVICES between ranks.

Not yet run on a GPU: shown over a stand-in for NVML alone (tests/fakes/fake_nvml.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import cuda

from collectives.transport.base import Transport

_CALLS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetTopologyCommonAncestor",
)
# A link is worth more than all hops of a ring over PCIe together, those within a GPU more than any
# number of links.
_LINK = 100
_WITHIN = 100 * _LINK
_SAME_BOARD = 6


def gpu_of(transport: Transport) -> str | None:
    """The UUID of the GPU that this rank uses; None where it is not known to use one of NVIDIA's.

    The transport's device, else the current one where the process uses CUDA already: it is not
    started for this.
    """
    device = getattr(transport, "device", None)
    if torch.version.cuda is None or (device is None and not cuda.is_initialized()):
        return None
    return str(cuda.get_device_properties(cuda.current_device() if device is None else device).uuid)


def speeds_between(gpus: Sequence[str]) -> list[list[int]] | None:
    """For GPUs of this host [from][to] how fast the way is, the greater the faster, symmetric.

    Only their order means something: NVLinks count first, equal through a switch; where there are
    none the nearer over PCIe is faster. None where NVML is missing or does not tell.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            devices = [_device(nvml, gpu) for gpu in gpus]
            return [[_speed(nvml, a, b) for b in devices] for a in devices]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _nvml() -> Any:
    """The module, or None where it is missing or too old."""
    try:
        with warnings.catch_warnings():
            # An older package of the same module says on import that it is deprecated.
            warnings.simplefilter("ignore")
            import pynvml
    except ImportError:
        return None
    return pynvml if all(hasattr(pynvml, name) for name in _CALLS) else None


class _Device(NamedTuple):
    """uuid: of the GPU or of a MIG part of it. bus: of the GPU. direct: its NVLinks by the bus of
    the GPU at their other end. switched: its NVLinks to a switch."""

    uuid: str
    handle: Any
    bus: str
    is_mig: bool
    direct: Counter[str]
    switched: int


def _device(nvml: Any, uuid: str) -> _Device:
    try:
        handle, is_mig = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), False
    except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
        part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        handle, is_mig = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), True
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId.lower()
    # Parts of a GPU cannot use its links: they have no peer-to-peer access.
    links = (Counter[str](), 0) if is_mig else _links(nvml, handle)
    return _Device(uuid, handle, bus, is_mig, *links)


def _links(nvml: Any, handle: Any) -> tuple[Counter[str], int]:
    """Active NVLinks by the bus of the device at their other end, and the number to a switch."""
    direct: Counter[str] = Counter()
    switched = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            # The GPU has not so many, or none.
            continue
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        try:
            other = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
            other = nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN
        if other == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            # Its bus is not asked for: behind a switch are all GPUs, in a virtual machine it has
            # none.
            switched += 1
        else:
            direct[nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId.lower()] += 1
    return direct, switched


def _speed(nvml: Any, a: _Device, b: _Device) -> int:
    if a.uuid == b.uuid:
        return _WITHIN
    if a.bus == b.bus:
        return _SAME_BOARD
    links = min(a.switched, b.switched) + min(a.direct[b.bus], b.direct[a.bus])
    if links:
        return links * _LINK
    # NVML's levels are 0 (on one board), 10, ..., 50 (across NUMA nodes).
    return _SAME_BOARD - nvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle) // 10

"""The back ends: Triton for CUDA tensors, compiled C or torch's functions for CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.cpu import dispatch
from kernels.gpu import launcher


@dataclass(frozen=True)
class BackendInfo:
    """The back ends of this process.

    Attributes:
        triton: The version of Triton, which computes on CUDA tensors; None without it.
        cpu: Whether compiled C or torch's functions compute on CPU tensors.
        why_torch: The reason for torch's functions; "" with compiled C.

    Examples:
        >>> kernels.BackendInfo(triton=None, cpu="torch", why_torch="no compiler").cpu_path
        'torch: no compiler'
    """

    triton: str | None
    cpu: Literal["compiled", "torch"]
    why_torch: str

    @property
    def cpu_path(self) -> str:
        """The code that CPU tensors use, for messages: "compiled", or "torch: " and the reason."""
        return f"torch: {self.why_torch}" if self.why_torch else "compiled"


def backend_info() -> BackendInfo:
    """Return the back ends of this process.

    Raises:
        ValueError: The environment variable ADASUM_CPU_KERNELS has an unknown value.
        RuntimeError: It demands compiled code, which is not available.

    Examples:
        >>> kernels.backend_info().cpu in ("compiled", "torch")
        True
    """
    reason = dispatch.reason()
    version = None if launcher.triton is None else str(launcher.triton.__version__)
    return BackendInfo(version, "torch" if reason else "compiled", reason)

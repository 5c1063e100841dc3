"""The CPU in place of GPUs, for torch's tests: what they put on a GPU stays where it is."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
# Where an argument without a name may be a GPU's index.
_INDEX = {"to": 1, "_parse_to": 0}
_IDLE = {
    torch: ("Event",),
    torch.accelerator: ("current_stream", "synchronize"),
    torch.cuda: ("Event", "Stream", "manual_seed", "set_device", "stream", "synchronize"),
}


def on_cpu(value: Any) -> Any:
    """Return the CPU for a GPU's name or device, and other values as they are."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value.partition(":")[0] == "cuda" else value
    return value


class _Idle:
    """A stream, an event or what a function of them returns, which does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _Idle

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class CpuForGpus(TorchFunctionMode):
    """Takes a GPU's index, name or device for the CPU in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:
            named["device"] = _CPU
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        index = _INDEX.get(name)
        places = enumerate(args)
        args = [_CPU if i == index and type(value) is int else on_cpu(value) for i, value in places]
        return func(*args, **named)


def import_helpers() -> None:
    """Let torch's test helpers be imported where expecttest is not installed."""
    try:
        import expecttest  # noqa: F401 - its absence is what is asked
    except ImportError:
        # Compares texts in the source of tests, of which none is run here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def install() -> None:
    """Let torch's test modules, imported later, run their tests for GPUs here."""
    import_helpers()
    from torch.testing._internal import common_distributed

    for name in ("skip_if_no_gpu", "skip_if_rocm_multiprocess"):
        setattr(common_distributed, name, _as_it_is)
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
        setattr(common_distributed, name, lambda *_, **__: _as_it_is)
    common_distributed.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
    # Streams, events and what waits for them: nothing is behind a GPU that is not there.
    for module, names in _IDLE.items():
        for name in names:
            setattr(module, name, type(name, (_Idle,), {}))
    torch.cuda.current_device = lambda: 0


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function

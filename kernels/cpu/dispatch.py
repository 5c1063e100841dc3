"""The CPU path: compiled code (native.py) if it is available, otherwise torch's functions.

Compiled code computes in float32 for float16, bfloat16 and float32, and in float64 for float64, and
rounds results once. Dot products are computed in float64, since no square of a float32 under- or
overflows there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.call import Call
from kernels.cpu import native, torch_fallback

_logger = logging.getLogger(__name__)
_VARIABLE = "ADASUM_CPU_KERNELS"
_CHOICES = ("auto", "native", "torch")
# "found": the compiled functions, or the reason for using torch's. Empty until the first use.
_state: dict[str, native.Library | str] = {}
_loading = threading.Lock()


def _found() -> native.Library | str:
    found = _state.get("found")
    if found is None:
        # Threads that need the functions at the same time wait for the first one to load them.
        with _loading:
            found = _state.get("found") or _state.setdefault("found", _load())
    return found


def _load() -> native.Library | str:
    choice = os.environ.get(_VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    if choice == "torch":
        return f"{_VARIABLE}=torch"
    try:
        return native.load()
    except native.Unavailable as error:
        if choice == "native":
            raise RuntimeError(f"{_VARIABLE}=native: {error}") from error
        _logger.warning(
            "CPU tensors are reduced by torch's functions, in float64, many times slower "
            "than compiled kernels: %s (%s=torch says that this is wanted)",
            error,
            _VARIABLE,
        )
        return str(error)


def library() -> native.Library | None:
    """Return the compiled functions; None if torch's are used.

    The environment variable ADASUM_CPU_KERNELS chooses: "auto", the default, "torch" or "native".

    Raises:
        ValueError: The variable has another value.
        RuntimeError: It is "native", but the compiled functions cannot be used.
    """
    # Asked at every call, mostly after the first use.
    found = _state.get("found") or _found()
    return None if isinstance(found, str) else found


def reason() -> str:
    """Return the reason for using torch's functions, "" if unused. Raises as `library` does."""
    found = _found()
    return found if isinstance(found, str) else ""


def bind(call: Call) -> Callable[..., None]:
    """Return a function of the call's scalars, which runs the call and can be used repeatedly."""
    if (found := library()) is not None:
        return found.bind(call)
    inputs = call.inputs
    if inputs and not inputs[0].is_contiguous():
        # All tensors are in one order in memory, so that is an order of elements.
        out = call.out if call.out.is_contiguous() else _flat(call.out)
        call = replace(call, inputs=[_flat(tensor) for tensor in inputs], out=out)
    return torch.no_grad()(partial(getattr(torch_fallback, call.function), call))


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))

"""The CPU path: compiled code (native.py) where it can be had, else torch's functions.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.

Each function here returns another, which runs what it was given any number of times.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import native, torch_fallback
from kernels.cpu.build import Unavailable
from kernels.findings import Findings
from kernels.layout import PackedList
from kernels.validation import PLAIN

_VARIABLE = "ADASUM_CPU_KERNELS"
_CHOICES = ("auto", "native", "torch")
# Where memory begins: more bytes than any tensor has. Most addresses are higher.
_FAR = 2**40


class _State:
    """found: the compiled functions, or why torch's are used; None until it is known."""

    def __init__(self) -> None:
        # Of a thread, whose signal handlers may call this, too.
        self.lock = threading.RLock()
        self.found: native.Library | str | None = None


_state = _State()


def _forked() -> None:
    """A thread that compiles is not in a child of the process, the lock that it held is."""
    _state.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _found() -> native.Library | str:
    with _state.lock:
        if _state.found is None:
            _state.found = _load()
        return _state.found


def _load() -> native.Library | str:
    choice = os.environ.get(_VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    if choice == "torch":
        return f"{_VARIABLE}=torch"
    try:
        return native.build()
    except Unavailable as error:
        if choice == "native":
            raise RuntimeError(f"{_VARIABLE}=native: {error}") from error
        return str(error)


def library() -> native.Library | None:
    """Return the compiled functions; None where torch's are used.

    The first call may compile, for about a second. ADASUM_CPU_KERNELS says what to use: "auto", the
    default, "torch", or "native".

    Raises:
        ValueError: The variable has another value.
        RuntimeError: It says "native", which is not to be had.
    """
    found = _found()
    return None if isinstance(found, str) else found


def reason() -> str:
    """Return why torch's functions are used, "" where they are not. Raises as `library`."""
    found = _found()
    return found if isinstance(found, str) else ""


def use_torch(why: str) -> None:
    """Use torch's functions from now on in this process, whatever the variable says.

    Their last bits are others: for ranks of which one has no compiled functions.
    """
    with _state.lock:
        _state.found = why


def _in_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Whether all can be read at their addresses: wrappers, fakes and torch's zeros cannot."""
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    # Without memory a tensor's address is where it starts: 0, of a view more, but no such number.
    return min(addresses, default=_FAR) >= _FAR or not any(
        tensor.numel() and address == tensor.storage_offset() * tensor.element_size()
        for tensor, address in zip(tensors, addresses, strict=True)
    )


def _compiled(
    name: str,
    tensors: Sequence[Tensor],
    addresses: array[int],
    dtypes: Sequence[torch.dtype],
    bounds: array[int],
    out: Tensor | None,
    findings: Findings,
    **others: Any,
) -> Callable[..., None] | None:
    """Bind a compiled function, as `Library.bind` has it; None where torch's is to be taken."""
    written = [one for one in (out, others.get("dots")) if one is not None]
    if not _in_memory(tensors, addresses):
        return None
    if not _in_memory(written, [*map(Tensor.data_ptr, written)]) or (found := library()) is None:
        return None
    return found.bind(name, addresses, dtypes, bounds, out, findings, **others)


def _compiled_pair(
    name: str,
    a: Tensor,
    b: Tensor,
    bounds: Sequence[int],
    out: Tensor | None,
    findings: Findings,
    dots: Tensor | None = None,
) -> Callable[..., None] | None:
    addresses = array("Q", (a.data_ptr(), b.data_ptr()))
    dtypes, cuts = (a.dtype, b.dtype), array("q", bounds)
    return _compiled(name, (a, b), addresses, dtypes, cuts, out, findings, dots=dots)


def copy(
    tensors: Sequence[Tensor],
    addresses: array[int],
    packed: PackedList,
    buffer: Tensor,
    findings: Findings,
    packing: bool,
) -> Callable[[float], None]:
    """Between the tensors and their slots of `buffer`, times a scale.

    addresses: the tensors', uint64. packing: whether into the buffer, with zeros into the padding.
    """
    numels, bounds = packed.layout.in_c
    return _compiled(
        "copy",
        tensors,
        addresses,
        packed.dtypes,
        bounds,
        buffer,
        findings,
        numels=numels,
        packing=packing,
    ) or partial(torch_fallback.copy, tensors, packed, buffer, findings, packing)


def sum_n(
    tensors: Sequence[Tensor], addresses: array[int], out: Tensor, findings: Findings
) -> Callable[[float], None]:
    """Bind out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    dtypes, bounds = [tensors[0].dtype] * len(tensors), array("q", (0, out.numel()))
    return _compiled("sum_n", tensors, addresses, dtypes, bounds, out, findings) or partial(
        torch_fallback.sum_n, tensors, out, findings
    )


def scaled_add(
    a: Tensor, b: Tensor, out: Tensor, findings: Findings
) -> Callable[[float, float], None]:
    """Bind out = alpha*a + beta*b, elementwise; `out` may be a or b."""
    return _compiled_pair("scaled_add", a, b, (0, out.numel()), out, findings) or partial(
        torch_fallback.scaled_add, a, b, out, findings
    )


def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int], dots: Tensor) -> Callable[[], None]:
    """Bind dots = rows (a.b, `|a|^2`, `|b|^2`) of the flattened segments."""
    return _compiled_pair("dot_and_norms", a, b, bounds, None, Findings(), dots) or partial(
        torch_fallback.dot_and_norms, a, b, bounds, dots
    )


def combine(
    a: Tensor, b: Tensor, dots: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings
) -> Callable[[], None]:
    """Bind out = (1 - d/(2A)) a + (1 - d/(2B)) b per segment; (d, A, B) are rows of `dots`."""
    return _compiled_pair("combine", a, b, bounds, out, findings, dots) or partial(
        torch_fallback.combine, a, b, dots, bounds, out, findings
    )


def adasum(
    a: Tensor, b: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings
) -> Callable[[], None]:
    """Bind out = `combine` of the tensors' `dot_and_norms`."""
    return _compiled_pair("adasum", a, b, bounds, out, findings) or partial(
        torch_fallback.adasum, a, b, bounds, out, findings
    )

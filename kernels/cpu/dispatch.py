"""The CPU path: compiled code (native.py) where it can be had, else torch's functions.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.

Each function here returns another, which runs what it was given any number of times.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial

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
    """library: the compiled functions. reason: why torch's are used, None until it is known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: native.Library | None = None
        self.reason: str | None = None


_state = _State()


def _forked() -> None:
    """A thread that compiles is not in a child of the process, the lock that it held is."""
    _state.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def library() -> native.Library | None:
    """Return the compiled functions; None where torch's are used.

    The first call may compile, for about a second. ADASUM_CPU_KERNELS says what to use: "auto", the
    default, "torch", or "native".

    Raises:
        ValueError: The variable has another value.
        RuntimeError: It says "native", which is not to be had.
    """
    if _state.reason is None:
        choice = os.environ.get(_VARIABLE) or "auto"
        if choice not in _CHOICES:
            raise ValueError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {choice!r}")
        with _state.lock:
            if _state.reason is None:
                _load(choice)
    return _state.library


def _load(choice: str) -> None:
    try:
        if choice == "torch":
            raise Unavailable(f"{_VARIABLE}=torch")
        _state.library, _state.reason = native.build(), ""
    except Unavailable as error:
        if choice == "native":
            raise RuntimeError(f"{_VARIABLE}=native: {error}") from error
        _state.reason = str(error)


def reason() -> str:
    """Return why torch's functions are used, "" where they are not. Raises as `library`."""
    library()
    return _state.reason or ""


def use_torch(why: str) -> None:
    """Use torch's functions from now on in this process, whatever the variable says.

    Their last bits are others: for ranks of which one has no compiled functions.
    """
    with _state.lock:
        _state.library, _state.reason = None, why


def _in_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Whether all can be read at their addresses: wrappers, fakes and torch's zeros cannot."""
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    # Without memory a tensor's address is where it starts: 0, of a view more, but no such number.
    if min(addresses, default=_FAR) >= _FAR:
        return True
    starts = map(
        operator.mul, map(Tensor.storage_offset, tensors), map(Tensor.element_size, tensors)
    )
    nowhere = itertools.compress(tensors, map(operator.eq, addresses, starts))
    return not any(map(Tensor.numel, nowhere))


def _library_for(*tensors: Tensor) -> native.Library | None:
    return library() if _in_memory(tensors, [*map(Tensor.data_ptr, tensors)]) else None


def _nothing(scale: float) -> None:
    """Stands for a copy of no tensor."""


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
    one_dtype = len(packed.dtype_set) == 1
    if one_dtype and _in_memory(tensors, addresses) and (found := _library_for(buffer)):
        return found.copy(packed, addresses, buffer, findings, packing)
    if not tensors:
        return _nothing
    function = torch_fallback.pack if packing else torch_fallback.unpack
    return partial(function, tensors, packed, buffer, findings)


def sum_n(
    tensors: Sequence[Tensor], addresses: array[int], out: Tensor, findings: Findings
) -> Callable[[float], None]:
    """Bind out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    if _in_memory(tensors, addresses) and (found := _library_for(out)):
        return found.sum_n(addresses, tensors[0].dtype, out, findings)
    return partial(torch_fallback.sum_n, tensors, out, findings)


def scaled_add(
    a: Tensor, b: Tensor, out: Tensor, findings: Findings
) -> Callable[[float, float], None]:
    """Bind out = alpha*a + beta*b, elementwise; `out` may be a or b."""
    if found := _library_for(a, b, out):
        return found.scaled_add(a, b, out, findings)
    return partial(torch_fallback.scaled_add, a, b, out, findings)


def dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int], dots: Tensor) -> Callable[[], None]:
    """Bind dots = rows (a.b, `|a|^2`, `|b|^2`) of the flattened segments."""
    if found := _library_for(a, b, dots):
        return found.projection("dot_and_norms", a, b, dots, bounds, None, Findings())
    return partial(torch_fallback.dot_and_norms, a, b, bounds, dots)


def combine(
    a: Tensor, b: Tensor, dots: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings
) -> Callable[[], None]:
    """Bind out = (1 - d/(2A)) a + (1 - d/(2B)) b per segment; (d, A, B) are rows of `dots`."""
    if found := _library_for(a, b, dots, out):
        return found.projection("combine", a, b, dots, bounds, out, findings)
    return partial(torch_fallback.combine, a, b, dots, bounds, out, findings)


def adasum(
    a: Tensor, b: Tensor, bounds: Sequence[int], out: Tensor, findings: Findings
) -> Callable[[], None]:
    """Bind out = `combine` of the tensors' `dot_and_norms`."""
    if found := _library_for(a, b, out):
        return found.projection("adasum", a, b, None, bounds, out, findings)
    return partial(torch_fallback.adasum, a, b, bounds, out, findings)

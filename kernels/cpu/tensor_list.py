"""A list's tensors read, and compared with what they are to be, all of them in one call of C.

torch hands out its own functions for that, by the C exchange API of DLPack 1.2
(https://dmlc.github.io/dlpack/latest/c_api.html). Python takes three to ten times as long.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.build import Unavailable, built

# Types of tensors that are no more than their memory, dtype and shape.
PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Fewer Python reads in less time than a call of C takes to prepare.
MANY = 12
# Of tensors whose addresses are yet to be read; dynamo can take it, and make none.
UNREAD: array[int] = array("Q")
# Of the struct's words: before it its version and a pointer, then functions that make tensors.
_DLTENSOR_FROM_PYOBJECT = 5
_DEVICES = {"cpu": 1, "cuda": 2}
# DLPack's code times 256, and bits.
_CODES = {
    torch.float16: 2 * 256 + 16,
    torch.bfloat16: 4 * 256 + 16,
    torch.float32: 2 * 256 + 32,
    torch.float64: 2 * 256 + 64,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_PLAIN: list[Any] = [*PLAIN]
_TYPES = (ctypes.py_object * 2)(*_PLAIN)
_Reader = Callable[..., int]


@functools.cache
def _reader() -> _Reader | None:
    """The C function with torch's to read a tensor; None where one of both is not to be had."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    get = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        capsule = Tensor.__dlpack_c_exchange_api__
        words = (ctypes.c_void_p * 6).from_address(get(capsule, b"dlpack_exchange_api"))
        source = Path(__file__).with_name("tensor_list.c")
        library = built("tensor_list", [source], {}, [], lambda path: ctypes.PyDLL(str(path)))
    except (AttributeError, TypeError, ValueError, Unavailable):
        return None
    if ctypes.c_uint32.from_buffer(words).value != 1:
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.read_list.argtypes = (
        *(pointer, ctypes.py_object, number, pointer),
        *(number, number, pointer, pointer, pointer),
    )
    library.read_list.restype = number
    return functools.partial(library.read_list, words[_DLTENSOR_FROM_PYOBJECT])


def rows(shapes: Sequence[Sequence[int]], times: int = 1) -> array[int]:
    """Return so many times these shapes as `read` takes them.

    The number of shapes, then of each one its dimensions and its sizes.
    """
    once = array("q")
    for shape in shapes:
        once.extend((len(shape), *shape))
    return array("q", (len(shapes) * times,)) + once * times


def codes(dtypes: Sequence[torch.dtype]) -> array[int]:
    """Return dtypes as `read` gives them."""
    return array("q", map(_CODES.__getitem__, dtypes))


def dtypes(found: array[int]) -> list[torch.dtype] | None:
    """Return the dtypes of `codes`; None where no kernel takes one of them."""
    if found == found[:1] * len(found) and (dtype := _DTYPES.get(found[0])):
        return [dtype] * len(found)
    return [_DTYPES[code] for code in found] if _DTYPES.keys() >= {*found} else None


def read(
    tensors: list[Any], shapes: array[int], device: torch.device | None = None
) -> tuple[array[int], array[int]] | None:
    """Return where tensors lie, as uint64, and their dtypes, as `codes`.

    Args:
        tensors: Of whatever.
        shapes: Theirs, as `rows`.
        device: Theirs; None takes that of the first.

    Returns:
        None where they are not as many, or one has another shape or device, is not contiguous,
        plain and in memory, or is a negative view; or no C can tell.
    """
    reader, count = _reader(), len(tensors)
    if reader is None or not count or type(tensors[0]) not in PLAIN:
        return None
    device = device or tensors[0].device
    where = _DEVICES.get(device.type, 0), device.index or 0
    at, of = array("Q", (0,)) * count, array("q", (0,)) * count
    into = at.buffer_info()[0], of.buffer_info()[0]
    try:
        # A negative view is told from others by no DLPack.
        if reader(tensors, count, _TYPES, *where, shapes.buffer_info()[0], *into) and not any(
            map(Tensor.is_neg, tensors)
        ):
            return at, of
    except RuntimeError:
        # torch cannot read one of them: the caller's own checks say which, and why.
        pass
    return None

"""A list's tensors compared with what they are to be, all of them in one call of C.

torch hands out its own functions for that, by the C exchange API of DLPack 1.2
(https://dmlc.github.io/dlpack/latest/c_api.html). Python takes ten times as long.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.build import Unavailable, built
from kernels.validation import PLAIN

# Of the struct's words: before it its version and a pointer, then functions that make tensors.
_DLTENSOR_FROM_PYOBJECT = 5
_DEVICES = {"cpu": 1, "cuda": 2}
# DLPack's code and bits.
_DTYPES = {
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
}
_Compare = Callable[[list[Tensor], int, int, int], int]


@functools.cache
def _compare() -> _Compare | None:
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
    pointers = ctypes.c_void_p, ctypes.c_void_p
    library.are_like.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_int64, *pointers)
    library.are_like.restype = ctypes.c_int64
    return functools.partial(library.are_like, words[_DLTENSOR_FROM_PYOBJECT])


class TensorsLike:
    """What the tensors of a list are to be."""

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        place = _DEVICES[device.type], device.index or 0
        self._count, self._rows = len(dtypes), array("q")
        for dtype, shape in zip(dtypes, shapes, strict=True):
            self._rows.extend((*place, *_DTYPES[dtype], len(shape), *shape))

    def addresses_of(self, tensors: list[Tensor]) -> array[int] | None:
        """Return where they lie, as uint64, if all are so, contiguous, plain and in memory.

        None says that one is not, or that no C could tell.
        """
        compare = _compare()
        if compare is None or len(tensors) != self._count:
            return None
        found = array("Q", bytes(8 * self._count))
        rows, into = self._rows.buffer_info()[0], found.buffer_info()[0]
        try:
            # A negative view is told from others by no DLPack.
            if (
                PLAIN.issuperset(map(type, tensors))
                and compare(tensors, self._count, rows, into)
                and not any(map(Tensor.is_neg, tensors))
            ):
                return found
        except RuntimeError:
            pass
        return None

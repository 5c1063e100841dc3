"""Argument checks shared by the public functions; every one runs before the first write."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
_SUPPORTED = frozenset(DTYPES)
# So many numbers Python compares one by one in less time than numpy takes to start.
_FEW = 16
PLAIN = frozenset({Tensor, torch.nn.Parameter})
_dtype, _layout = operator.attrgetter("dtype"), operator.attrgetter("layout")
_is_cpu, _is_cuda = operator.attrgetter("is_cpu"), operator.attrgetter("is_cuda")
_is_nested = operator.attrgetter("is_nested")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is one of the four floating dtypes the kernels take."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}, which is not supported: convert to {_NAMES}")


def _is_negative(tensor: Tensor) -> bool:
    """Whether the memory holds the values' negatives; dynamo cannot read that, nor makes it."""
    return not torch.compiler.is_compiling() and tensor.is_neg()


def check_tensor(name: str, tensor: object) -> Tensor:
    """Return `tensor` if a kernel can read it: dense, contiguous, supported dtype, CPU or CUDA.

    Raises TypeError (not a tensor, dtype) or ValueError (layout, contiguity, device).
    """
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype in _SUPPORTED
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_nested or _is_negative(tensor))
        and tensor.is_contiguous()
    ):
        return tensor
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    check_dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}, not dense: call .to_dense() first")
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor: pass its parts, {name}.unbind()")
    if _is_negative(tensor):
        raise ValueError(f"{name} is a negative view: pass {name}.resolve_neg()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}: move it to the CPU or a CUDA device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")
    return tensor


def check_sized(name: str, tensor: object) -> Tensor:
    """Return `tensor` if a kernel takes its dtype; where it lies and how does not matter.

    For functions that only count bytes. Raises TypeError (not a tensor, dtype) or ValueError
    (layout).
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    check_dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{name} is not dense: call .to_dense() first")
    return tensor


def check_sequence(name: str, tensors: object) -> Sequence[object]:
    """Return `tensors` if it is a list or tuple, of whatever."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        kind = type(tensors).__name__
        raise TypeError(f"{name} must be a list or tuple of tensors, not {kind}")
    return tensors


def all_sound(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are readable and on one device; no word on what is wrong where not.

    A model has hundreds of tensors and this runs on every call: `map` over C functions takes a
    fifth of the time of a Python loop.
    """
    return (
        PLAIN.issuperset(map(type, tensors))
        and _SUPPORTED.issuperset(map(_dtype, tensors))
        and set(map(_layout, tensors)) <= {torch.strided}
        and (
            all(map(_is_cpu, tensors))
            or (all(map(_is_cuda, tensors)) and len(set(map(Tensor.get_device, tensors))) == 1)
        )
        and not any(map(_is_nested, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and all(map(Tensor.is_contiguous, tensors))
    )


def same_device(tensor: Tensor, other: Tensor) -> bool:
    """Whether two CPU or CUDA tensors lie on one device; cheaper than comparing `.device`."""
    return tensor.is_cpu == other.is_cpu and tensor.get_device() == other.get_device()


def check_tensors(name: str, tensors: object) -> list[Tensor]:
    """Return the list form of a sequence of readable tensors that all lie on one device."""
    if not isinstance(tensors, Tensor) and isinstance(tensors, Sequence) and all_sound(tensors):
        return list(tensors)
    given = check_sequence(name, tensors)
    checked = [check_tensor(f"{name}[{i}]", tensor) for i, tensor in enumerate(given)]
    for i, tensor in enumerate(checked):
        if tensor.device != checked[0].device:
            raise ValueError(
                f"{name}[{i}] is on {tensor.device} but {name}[0] is on {checked[0].device}: "
                "move all to one device"
            )
    return checked


def check_like(name: str, tensor: object, like_name: str, like: Tensor) -> Tensor:
    """Return `tensor` if it is readable and has the shape, dtype and device of `like`."""
    checked = check_tensor(name, tensor)
    if checked.dtype != like.dtype:
        raise TypeError(
            f"{name} has dtype {checked.dtype} but {like_name} has {like.dtype}: convert one"
        )
    return _check_place(name, checked, like_name, like)


def check_place(name: str, tensor: object, like_name: str, like: Tensor) -> Tensor:
    """Return `tensor` if it is readable and has the shape and device of `like`, of any dtype."""
    return _check_place(name, check_tensor(name, tensor), like_name, like)


def _check_place(name: str, checked: Tensor, like_name: str, like: Tensor) -> Tensor:
    if not same_device(checked, like):
        raise ValueError(
            f"{name} is on {checked.device} but {like_name} is on {like.device}: move one"
        )
    if checked.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)} but {like_name} has "
            f"{tuple(like.shape)}: they must be equal"
        )
    return checked


def check_scalar(name: str, value: object) -> float:
    """Return `value` as a float; TypeError for what is no number, ValueError for a too big one."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an int that no float64 holds: pass a smaller one") from None


def check_writable(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` if torch lets this code write to it, as it does to all but one kind."""
    if torch.compiler.is_compiling():
        return tensor
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} was made in inference mode: pass {name}.clone()")
    return tensor


def check_all_writable(name: str, tensors: Sequence[Tensor]) -> None:
    """`check_writable` of each of a list."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    if any(map(Tensor.is_inference, tensors)):
        for i, tensor in enumerate(tensors):
            check_writable(f"{name}[{i}]", tensor)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First address and the one past the last of a contiguous tensor."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def check_no_overlap(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if any byte of `written` belongs to `other`."""
    low, high = byte_range(written)
    start, stop = byte_range(other)
    if low < stop and start < high and low < high and start < stop:
        raise ValueError(f"{name} overlaps {other_name} in memory: pass a separate tensor")


def check_disjoint(name: str, addresses: array[int], sizes: array[int]) -> None:
    """Raise ValueError if two of the tensors of a list, all about to be written, share memory.

    Args:
        name: Of the list.
        addresses: Where the tensors lie, as uint64.
        sizes: Their bytes, as uint64.
    """
    if len(addresses) > _FEW:
        starts, ends = _numbers(addresses), _numbers(addresses) + _numbers(sizes)
        order = starts.argsort()
        if (ends[order][:-1] <= starts[order][1:]).all():
            return
    last, owner = 0, 0
    for start, size, i in sorted(zip(addresses, sizes, range(len(sizes)), strict=True)):
        if size and start < last:
            raise ValueError(
                f"{name}[{min(i, owner)}] and {name}[{max(i, owner)}] overlap in memory: "
                "pass separate ones"
            )
        if size:
            last, owner = start + size, i


def _numbers(values: array[int]) -> np.ndarray:
    return np.frombuffer(values, dtype=np.uint64)


def near(addresses: array[int], reach: int, buffer: Tensor) -> list[int]:
    """Return which of a list's tensors may overlap `buffer`, by their addresses.

    Args:
        addresses: Where the tensors lie, as uint64.
        reach: More bytes than none of them has.
        buffer: Contiguous.
    """
    low, high = byte_range(buffer)
    low -= reach
    if len(addresses) <= _FEW:
        return [i for i, start in enumerate(addresses) if low < start < high]
    starts = _numbers(addresses)
    found: list[int] = np.flatnonzero((starts < high) & (starts > max(low, 0))).tolist()
    return found


def check_target(
    out: object | None, like_name: str, like: Tensor, dtype: torch.dtype | None
) -> torch.dtype:
    """Check the output of an elementwise function, None where it is to be `new_like`.

    dtype: of the output, None for that of `out` or, without one, of `like`; returned.
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    if out is None:
        return like.dtype if dtype is None else dtype
    target = check_writable("out", check_place("out", out, like_name, like))
    if dtype is not None and target.dtype != dtype:
        raise TypeError(f"out has dtype {target.dtype} but dtype is {dtype}: drop one of them")
    return target.dtype


def new_like(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An output for `like`, of `dtype` or, without one, of its own."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def check_pair(a: object, b: object, out: object | None) -> Tensor:
    """Check two equal inputs and their output, None where it is to be `new_like`; returns a.

    Where they overlap is for `check_written`.
    """
    left = check_tensor("a", a)
    check_like("b", b, "a", left)
    if out is not None:
        check_writable("out", check_like("out", out, "a", left))
    return left


def check_output(
    out: Tensor, inputs: Sequence[Tensor], addresses: array[int], name: Callable[[int], str]
) -> None:
    """Raise ValueError unless `out` is an input, or apart from it, for each.

    Args:
        out: Written element by element.
        inputs: Of as many elements.
        addresses: Where they lie, as uint64.
        name: Of the i-th.
    """
    # No element has more than 8 bytes.
    for i in near(addresses, 8 * inputs[0].numel(), out):
        if byte_range(inputs[i]) != byte_range(out):
            check_no_overlap("out", out, name(i), inputs[i])


def _all_rise(bounds: tuple[Any, ...], numel: int) -> bool:
    """Whether these are ints from 0 to `numel` in order; for all, since a model has hundreds."""
    return (
        {*map(type, bounds)} == {int}
        and bounds[0] == 0
        and bounds[-1] == numel
        and all(map(operator.le, bounds, bounds[1:]))
    )


def check_segments(segments: object, numel: int) -> tuple[int, ...]:
    """Return the boundaries (0, e1, ..., numel) as a tuple; None means one segment.

    Raises TypeError for boundaries that are not integers and ValueError where they do not rise
    from 0 to `numel`.
    """
    if segments is None:
        return (0, numel)
    if isinstance(segments, Tensor) or not isinstance(segments, Sequence):
        raise TypeError(
            f"segments must be a list or tuple of ints, not {type(segments).__name__}: "
            "pass tensor.tolist()"
        )
    bounds = tuple(segments)
    if not torch.compiler.is_compiling() and _all_rise(bounds, numel):
        return bounds
    if not all(type(bound) is int for bound in bounds):
        bad = next(bound for bound in bounds if type(bound) is not int)
        raise TypeError(f"segments must hold ints, not {type(bad).__name__}")
    if not bounds or bounds[0] != 0 or bounds[-1] != numel:
        ends = f"{bounds[0]} and {bounds[-1]}" if bounds else "nothing"
        raise ValueError(
            f"segments must start at 0 and end at the {numel} elements of a, not {ends}"
        )
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high < low:
            raise ValueError(f"segments must not decrease, but [{i + 1}] = {high} < [{i}] = {low}")
    return bounds


def check_dots(dots: object, count: int, like: Tensor) -> Tensor:
    """Return `dots` if it is the contiguous float64 [count, 3] tensor `combine` needs."""
    checked = check_tensor("dots", dots)
    if checked.dtype != torch.float64:
        raise TypeError(f"dots has dtype {checked.dtype}: pass what dot_and_norms returns, float64")
    if tuple(checked.shape) != (count, 3):
        raise ValueError(
            f"dots has shape {tuple(checked.shape)} but segments ask for {(count, 3)}: "
            "call dot_and_norms with the same segments"
        )
    if checked.device != like.device:
        raise ValueError(f"dots is on {checked.device} but a is on {like.device}: move one")
    return checked


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple

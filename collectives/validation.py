"""Checks of arguments that collectives share, before anything is sent.

Each check raises TypeError or ValueError with the name of the argument; some return the checked
value. The first parameter, `argument`, is the argument's name in errors.
"""

from __future__ import annotations

import numbers
import operator
import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import UnionType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from collectives.reducers import COPIED, Needs, Reducer, from_torch
from kernels.validation import check_memory_of

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# nn.Buffer makes plain tensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def instance(argument: str, value: object, kinds: type | UnionType, expected: str) -> None:
    """Check a value's type; a bool is not an int. `expected` describes the type in errors."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(f"{argument} must be {expected}, got {type(value).__name__}")


def no_mode(what: str) -> None:
    """Check that no mode or transform intercepts torch's operations in this thread.

    It would intercept the collective's own operations, on this rank only, and create the tensors
    that are kept for later calls. `what` cannot be sent, for errors.
    """
    # Repeats a part of `active_mode`, to save a function call in the usual case.
    seen = _len_torch_dispatch_stack() or _len_torch_function_stack() or peek_interpreter_stack()
    if seen and (mode := active_mode()):
        raise TypeError(f"{what} cannot be sent inside {mode}: make the call outside of it")


def active_mode() -> str:
    """Return the mode or transform that intercepts operations in this thread, or ""."""
    # torch's own is_in_torch_dispatch_mode() considers all threads together.
    if _len_torch_dispatch_stack():
        return "a TorchDispatchMode, such as FakeTensorMode or FlopCounterMode"
    if peek_interpreter_stack() is not None:
        return "a transform of torch.func, such as vmap or grad"
    if _len_torch_function_stack() and _has_function_mode():
        return "a TorchFunctionMode"
    return ""


def _has_function_mode() -> bool:
    """Whether a TorchFunctionMode is active, other than torch.set_default_device's."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def plain(argument: str, value: torch.Tensor) -> None:
    """Check that the tensor, of any layout, has memory with its values.

    Raises TypeError for classes that change torch's operators, such as DTensor or FakeTensor, for
    tensors wrapped by a transform of torch.func, and for storage that is too short.
    """
    if type(value) not in _PLAIN:
        _check_class(argument, type(value))
    if value.layout is torch.strided and not (value.is_meta or value.is_nested):
        check_memory_of(argument, value)
    if forward_ad._current_level >= 0:
        _check_tangent(argument, value)


def _check_tangent(argument: str, value: torch.Tensor) -> None:
    """Raise ValueError for tensors with a forward-mode derivative, as that would be lost."""
    if forward_ad.unpack_dual(value).tangent is not None:
        raise ValueError(
            f"{argument} has a tangent, and collectives have no forward-mode derivatives: pass "
            f"forward_ad.unpack_dual({argument}).primal, of torch.autograd"
        )


def _check_recorded(argument: str, value: torch.Tensor) -> None:
    """Raise ValueError for the result of an operation that autograd has recorded.

    Parameters, other leaves and views of them are allowed: operations on them are recorded later.
    """
    base = value if value._base is None else value._base
    if torch.is_grad_enabled() and not base.is_leaf:
        raise ValueError(
            f"{argument} requires grad, and a gradient through this call would be lost: pass "
            f"{argument}.detach(), or use adasum's functions, such as adasum.allreduce"
        )


def _check_class(argument: str, kind: type[torch.Tensor]) -> None:
    """Raise TypeError for a subclass that overrides torch's operators."""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{argument} must be a plain torch.Tensor, got {kind.__name__}, which may have no "
            "memory of its own: pass what is inside it, such as to_local() of a DTensor, or "
            "unbind() of a nested tensor"
        )


def tensor(argument: str, value: torch.Tensor, *, written: bool = True) -> None:
    """Check a dense, contiguous tensor that can be copied and, if `written`, written to."""
    no_mode(argument)
    entry(argument, value, written=written)


def entry(argument: str, value: torch.Tensor, *, written: bool = True) -> None:
    """Check like `tensor`, except for modes, which the caller checks once for many tensors."""
    if type(value) not in _PLAIN:
        instance(argument, value, torch.Tensor, "a torch.Tensor")
        if is_lazy(value):
            raise ValueError(
                f"{argument} is an uninitialised parameter: call its module once first"
            )
        _check_class(argument, type(value))
    if value.layout is not torch.strided:
        raise ValueError(f"{argument} must be dense, got layout {value.layout}: use to_dense()")
    if value.is_nested:
        raise ValueError(f"{argument} must not be nested: pass its parts, {argument}.unbind()")
    if value.is_quantized:
        raise ValueError(f"{argument} must not be quantized: pass {argument}.int_repr()")
    if value.is_meta:
        raise ValueError(
            f"{argument} is on meta, where tensors have no values: give the module memory first, "
            'by to_empty(device="cpu") or by loading it'
        )
    if value.dtype not in COPIED:
        raise TypeError(f"{argument} is of {value.dtype}, which torch cannot copy")
    if value.is_conj() or value.is_neg():
        raise ValueError(
            f"{argument} must hold its values, and is a conjugate or negative view: pass "
            f"{argument}.resolve_conj().resolve_neg()"
        )
    if written and value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{argument} was made in inference mode: pass {argument}.clone()")
    if not value.is_contiguous():
        raise ValueError(
            f"{argument} must be contiguous, got shape {tuple(value.shape)} with strides "
            f"{value.stride()}: pass {argument}.contiguous() and copy the result back"
        )
    check_memory_of(argument, value)
    if value.requires_grad:
        _check_recorded(argument, value)
    if forward_ad._current_level >= 0:
        _check_tangent(argument, value)


def tensors(argument: str, values: object, *, dense: bool = False) -> list[torch.Tensor]:
    """Check a list of tensors of any kind; with `dense`, only strided ones."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        kind = type(values).__name__
        raise TypeError(f"{argument} must be a list or tuple of tensors, got {kind}")
    no_mode(argument)
    for i, value in enumerate(values):
        instance(f"{argument}[{i}]", value, torch.Tensor, "a torch.Tensor")
        if not is_lazy(value):
            plain(f"{argument}[{i}]", value)
        if value.is_nested or (dense and value.layout is not torch.strided):
            raise ValueError(f"{argument}[{i}] must be a dense tensor: use to_dense() or unbind()")
    return list(values)


def integer(argument: str, value: int, least: int | None = None) -> None:
    """Check an int; `least` is the smallest allowed value, None for any."""
    if type(value) is not int:
        instance(argument, value, int, "an int")
    if least is not None and value < least:
        rule = f"be at least {least}" if least else "not be negative"
        raise ValueError(f"{argument} must {rule}, got {value}")


def tensor_list(argument: str, values: object) -> list[torch.Tensor]:
    """Check dense, contiguous tensors that share no memory."""
    if isinstance(values, torch.Tensor):
        raise TypeError(f"{argument} must be a sequence of tensors, got one tensor")
    if not isinstance(values, Iterable):
        raise TypeError(f"{argument} must be a sequence of tensors, got {type(values).__name__}")
    no_mode(argument)
    values = list(values)
    for i, value in enumerate(values):
        entry(f"{argument}[{i}]", value)
    if len(values) == 1:
        return values
    # Sorted by address, so that only neighbours must be compared.
    spans = sorted(
        (str(v.device), v.data_ptr(), v.data_ptr() + v.numel() * v.element_size(), i)
        for i, v in enumerate(values)
        if v.numel()
    )
    for (device, _, stop, i), (other_device, start, _, j) in pairwise(spans):
        if device == other_device and start < stop:
            raise ValueError(f"{argument}[{i}] and {argument}[{j}] overlap in memory: pass copies")
    return values


def apart(argument: str, value: torch.Tensor, other: str, tensor: torch.Tensor) -> None:
    """Check that two contiguous tensors share no memory."""
    if value.device == tensor.device and value.nbytes and tensor.nbytes:
        start, other_start = value.data_ptr(), tensor.data_ptr()
        if start < other_start + tensor.nbytes and other_start < start + value.nbytes:
            raise ValueError(f"{argument} and {other} overlap in memory: pass another {argument}")


def names(argument: str, values: object, count: int) -> tuple[str, ...]:
    """Check one name for each of `count` tensors, or an empty list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{argument} must be a list of str, got {type(values).__name__}")
    checked = tuple(values)
    for i, value in enumerate(checked):
        instance(f"{argument}[{i}]", value, str, "a str")
    if checked and len(checked) != count:
        raise ValueError(f"{argument} must be {count}, one per tensor, got {len(checked)}")
    return checked


def segments(values: object, numel: int) -> tuple[int, ...]:
    """Check element boundaries that start at 0, do not descend and end at `numel`."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise TypeError(f"segments must be a list or tuple of ints, got {kind}")
    try:
        bounds = tuple(map(operator.index, values))
    except TypeError as error:
        raise TypeError(f"segments must be ints: {error}") from None
    if not bounds or bounds[0] != 0 or bounds[-1] != numel:
        raise ValueError(f"segments must start at 0 and end at the tensor's {numel} elements")
    if any(b < a for a, b in pairwise(bounds)):
        raise ValueError("segments must not descend")
    return bounds


def rank(argument: str, value: int, size: int) -> None:
    """Check for a rank number below `size`."""
    integer(argument, value)
    if not 0 <= value < size:
        raise ValueError(f"{argument} must be a rank from 0 to {size - 1}, got {value}")


def distinct_ranks(argument: str, values: object, size: int) -> tuple[int, ...]:
    """Check for one or more different ranks in a group of `size` ranks."""
    if not isinstance(values, Iterable) or isinstance(values, str | torch.Tensor):
        raise TypeError(f"{argument} must be a sequence of ranks, got {type(values).__name__}")
    members = tuple(values)
    for i, value in enumerate(members):
        rank(f"{argument}[{i}]", value, size)
    if not members or len({*members}) < len(members):
        raise ValueError(f"{argument} must be one or more different ranks, got {list(members)}")
    return members


def row_splits(
    argument: str, values: Sequence[int] | torch.Tensor | None, rows: int, size: int
) -> torch.Tensor:
    """Check the numbers of a tensor's rows for each rank; return them, int64 [size] on the CPU."""
    if values is None:
        if rows % size:
            raise ValueError(
                f"{argument} must give the number of rows for each of {size} ranks: "
                f"{rows} rows cannot be split equally"
            )
        return torch.full((size,), rows // size, device="cpu")
    if isinstance(values, torch.Tensor):
        plain(argument, values)
    try:
        counts = torch.as_tensor(values, device="cpu")
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        if "verflow" in str(error):
            raise ValueError(f"{argument} must be row counts, got {values}") from error
        kind = type(values).__name__
        raise TypeError(f"{argument} must be a list or tensor of ints, got {kind}") from error
    if counts.dtype not in _INTEGERS or counts.layout is not torch.strided or counts.is_nested:
        raise ValueError(f"{argument} must be ints, got {counts.dtype} {counts.layout}")
    if counts.shape != (size,) or bool((counts < 0).any()):
        raise ValueError(f"{argument} must be {size} row counts, got {counts.tolist()}")
    # Summed in Python, whose integers cannot overflow.
    if (whole := sum(counts.tolist())) > rows:
        raise ValueError(f"{argument} must add up to at most tensor's {rows} rows, got {whole}")
    return counts.to(torch.int64)


def reducer(argument: str, value: Any) -> Reducer:
    """Return a Reducer, such as Sum, or the one that torch names, as dist.ReduceOp.SUM does."""
    if not isinstance(value, Reducer):
        value = from_torch(argument, value)
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"{argument} must be a Reducer such as collectives.Sum, got Tensor: pass the "
                "tensor for the result as out="
            )
        instance(argument, value, Reducer, "a Reducer such as collectives.Sum")
    if not isinstance(value.needs, Needs):
        raise TypeError(f"needs of {argument} {value} must be Needs, got {value.needs!r}")
    return value


def timeout(value: float) -> None:
    """Check a number of seconds: positive, and at most the longest wait of Python's threads."""
    instance("timeout", value, int | float, "a number of seconds")
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(
            "timeout must be a positive number of seconds, at most "
            f"{threading.TIMEOUT_MAX:.0f}, got {value}"
        )


def nbytes(value: float) -> None:
    """Check a length in bytes, which may be 1e6."""
    instance("nbytes", value, int | float, "a number")
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"nbytes must be finite and not negative, got {value}")


def scale(argument: str, value: float) -> float:
    """Return a finite factor as a float."""
    if type(value) is not float:
        # NumPy's numbers are real, too.
        instance(argument, value, numbers.Real, "a number")
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{argument} must be finite: no float64 is so large") from None
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{argument} must be finite, got {value}")
    return value


def scales_of(dtype: torch.dtype, **scales: float) -> None:
    """Check that factors for tensors of a dtype are in the range of its arithmetic.

    Larger factors would make all values except zero infinite, or exceed the dtype's integers.
    """
    if dtype == torch.bool:
        raise TypeError(f"prescale and postscale have no meaning for {dtype}")
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype.to_real() == torch.float64
        most = torch.finfo(torch.float64 if wide else torch.float32).max
    else:
        most = torch.iinfo(dtype).max
    for argument, value in scales.items():
        if abs(value) > most:
            raise ValueError(f"{argument} must lie within ±{most:.4g} for {dtype}, got {value}")

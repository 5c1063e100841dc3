"""Argument checks that the public functions share, made before anything is written."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling as is_compiling

# Types of tensors whose memory holds their values.
PLAIN = frozenset({Tensor, torch.nn.Parameter})
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "did you mean ...?" for the most similar name; "" if none is similar enough."""
    by_lower_case = {each.lower(): each for each in names}
    close = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.75)
    return f"did you mean {by_lower_case[close[0]]}?" if close else ""


def tracing() -> bool:
    """Whether torch.compile, export or a dispatch mode traces this thread's calls.

    make_fx, aot_function and FakeTensorMode are dispatch modes. If a mode runs the calls, such as
    one that counts them, the operator gives the same bits as an eager call.
    """
    # Not torch's is_compiling() and is_in_torch_dispatch_mode(), whose answer is for all threads:
    # one thread may reduce while another compiles.
    return is_compiling() or bool(_len_torch_dispatch_stack())


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is one of `DTYPES`."""
    if dtype not in DTYPES:
        has = "is" if name == "dtype" else "has dtype"
        raise TypeError(f"{name} {has} {dtype}, which is not supported: convert to {_NAMES}")


def check_tensor(name: str, tensor: object, *, any_order: bool = False) -> Tensor:
    """Return `tensor` if a kernel can read it: dense, contiguous, supported dtype, CPU or CUDA.

    any_order: Whether its dimensions may be in any order in memory, as in torch.channels_last.
    Raises TypeError (not a tensor, dtype) or ValueError (layout, contiguity, device).
    """
    if not isinstance(tensor, Tensor) or not (type(tensor) in PLAIN or tracing()):
        raise TypeError(_not_plain(name, tensor))
    check_dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}, not dense: call .to_dense() first")
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor: pass its parts, {name}.unbind()")
    # dynamo cannot trace is_neg, and makes no negative views itself.
    if not is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} is a negative view: pass {name}.resolve_neg()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}: move it to the CPU or a CUDA device")
    if not tensor.is_contiguous() and not (any_order and fills_memory(tensor)):
        raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")
    return tensor


def fills_memory(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous if its dimensions are permuted, as in torch.channels_last."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions that have more than one element."""
    rows = zip(tensor.stride(), tensor.shape, strict=True)
    return [] if tensor.is_contiguous() else [stride for stride, size in rows if size != 1]


def _not_plain(argument: str, tensor: object) -> str:
    kind = type(tensor).__name__
    if not isinstance(tensor, Tensor):
        return f"{argument} must be a torch.Tensor, got {kind}"
    return (
        f"{argument} is a {kind}, whose values its memory need not hold: pass the plain tensor "
        "behind it, .to_local() of a DTensor or .as_subclass(torch.Tensor) of one that only adds "
        "methods"
    )


def check_memory_of(name: str, tensor: Tensor) -> None:
    """Check that the storage of a strided tensor of any dtype holds all its elements.

    For code that reads memory by its address or sends it, here and in collectives.

    Raises:
        TypeError: The tensor has no memory of its own, or its storage is too short.
    """
    try:
        storage = tensor.untyped_storage()
        # Both raise if there is no memory.
        _, held = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        raise TypeError(
            f"{name} has no memory of its own, like every tensor inside torch.func's transforms "
            "(vmap, grad, jvp, functionalize): make the call outside of them"
        ) from None
    reach = tensor.numel()
    if reach and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum([(size - 1) * stride for size, stride in steps])
    if reach and (tensor.storage_offset() + reach) * tensor.element_size() > held:
        raise TypeError(
            f"{name} reaches beyond its storage, which was resized (FSDP does so to free unused "
            f"parameters): pass {name} while its memory is there"
        )


def check_sized(name: str, tensor: object) -> Tensor:
    """Return `tensor` if it is dense and of a supported dtype, on any device, contiguous or not.

    For functions that only count bytes. Raises TypeError (not a tensor, dtype) or ValueError
    (layout).
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    check_dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{name} is not dense: call .to_dense() first")
    return tensor


def read_list(name: str, tensors: object) -> list[Any]:
    """Return the elements of a list or any other ordered iterable, of any types, in a new list.

    The copy makes sure that the checked elements are used: another thread may change the list, and
    a generator returns each element once. A dict such as a state_dict is refused: it would give its
    keys.
    """
    # isinstance takes less time for list and tuple than for Iterable.
    if not isinstance(tensors, (list, tuple)) and (
        isinstance(tensors, (Tensor, Set, Mapping)) or not isinstance(tensors, Iterable)
    ):
        kind = type(tensors).__name__
        raise TypeError(f"{name} must be a list or tuple of tensors, got {kind}")
    return list(tensors)


def check_each(name: str, given: Sequence[Any], *, any_order: bool = False) -> list[Tensor]:
    """Return the elements of `read_list` if all are readable tensors on one device."""
    checked = [
        check_tensor(f"{name}[{i}]", tensor, any_order=any_order) for i, tensor in enumerate(given)
    ]
    for i, tensor in enumerate(checked[1:], 1):
        if tensor.device != checked[0].device:
            raise ValueError(
                f"{name}[{i}] is on {tensor.device} but {name}[0] is on {checked[0].device}: "
                "move all to one device"
            )
    return checked


def check_like(
    name: str, tensor: object, like_name: str, like: Tensor, *, any_dtype: bool = False
) -> Tensor:
    """Return `tensor` if it is readable and has the shape, device, dtype and order of `like`."""
    checked = check_tensor(name, tensor, any_order=True)
    if checked.dtype != like.dtype and not any_dtype:
        raise TypeError(
            f"{name} has dtype {checked.dtype} but {like_name} has {like.dtype}: convert one"
        )
    if checked.device != like.device:
        raise ValueError(
            f"{name} is on {checked.device} but {like_name} is on {like.device}: move one"
        )
    if checked.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)} but {like_name} has "
            f"{tuple(like.shape)}: they must be equal"
        )
    if _strides(checked) != _strides(like):
        raise ValueError(
            f"{name} is not in memory in the order of {like_name}, with strides {checked.stride()} "
            f"and {like.stride()}: pass .contiguous() of both"
        )
    return checked


def check_segments(segments: object, numel: int) -> tuple[int, ...]:
    """Return the boundaries (0, e1, ..., numel) as a tuple; None means one segment.

    Raises:
        TypeError: A boundary is not an int.
        ValueError: The boundaries do not rise from 0 to `numel`.
    """
    if segments is None:
        return (0, numel)
    if isinstance(segments, Tensor) or not isinstance(segments, Sequence):
        raise TypeError(
            f"segments must be a list or tuple of ints, got {type(segments).__name__}: "
            "pass tensor.tolist()"
        )
    bounds = tuple(segments)
    # torch's operators pass a SymInt for what may change between calls of a graph.
    if not all(type(bound) in (int, torch.SymInt) for bound in bounds):
        bad = next(bound for bound in bounds if type(bound) is not int)
        raise TypeError(f"segments must hold ints, got {type(bad).__name__}")
    if not bounds or bounds[0] != 0 or bounds[-1] != numel:
        ends = f"{bounds[0]} and {bounds[-1]}" if bounds else "nothing"
        raise ValueError(
            f"segments must start at 0 and end at the {numel} elements of a tensor, got {ends}"
        )
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high < low:
            raise ValueError(f"segments must not decrease, but [{i + 1}] = {high} < [{i}] = {low}")
    return bounds


def check_scalar(name: str, value: object) -> float:
    """Return `value` as a float; TypeError if it is not a number, ValueError if it is too large."""
    if type(value) is float:
        return value
    # NumPy's numbers are real, too.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an int that no float64 holds: pass a smaller one") from None


def check_flag(name: str, value: object) -> bool:
    """Return bool(value); TypeError if that fails, as for tensors of several elements."""
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a bool, got {kind}: pass True or False") from None


def check_factor(name: str, value: object) -> float | Tensor:
    """Return a scale, alpha or beta: a float, or a 0-d tensor that each run reads."""
    if not isinstance(value, Tensor):
        return check_scalar(name, value)
    tensor = check_tensor(name, value)
    if tensor.dim() > 0:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: pass a float or a 0-d tensor")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, and has no derivative: pass {name}.detach()")
    return tensor


EQUAL = 1.0, 1.0
"""Equal weights, which give Adasum's usual formula."""


def check_weights(weights: object) -> tuple[float, float]:
    """Return 1 + q/p and 1 + p/q of the weights (p, q): Adasum's factors of |a|^2 and |b|^2.

    They equal (p + q)/p and (p + q)/q, but without a sum that could overflow, and are exactly 2 if
    p = q.

    Raises:
        TypeError: The weights are not two numbers.
        ValueError: A weight is not positive and finite.
    """
    # dynamo does not know the identity of tuples.
    if not is_compiling() and weights is EQUAL:
        return 2.0, 2.0
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        raise TypeError(f"weights must be two numbers (p, q), got {weights!r}")
    p, q = check_scalar("weights[0]", weights[0]), check_scalar("weights[1]", weights[1])
    if not (0.0 < p < math.inf and 0.0 < q < math.inf):
        raise ValueError(f"weights must be positive and finite, got {weights!r}")
    return 1.0 + q / p, 1.0 + p / q


def check_writable(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor`; ValueError if it was made in inference mode and this is outside of it."""
    if is_compiling():
        return tensor
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} was made in inference mode: pass {name}.clone()")
    return tensor


def check_all_writable(name: str, tensors: Sequence[Tensor]) -> None:
    """Call `check_writable` on each tensor of a list."""
    for i, tensor in enumerate(tensors):
        check_writable(f"{name}[{i}]", tensor)


def check_found_inf(found_inf: object, device: torch.device) -> None:
    """Check the flag that a function sets if it writes Inf or NaN; None means no flag.

    device: The device of the other arguments.

    Raises:
        TypeError: It is not one float32.
        ValueError: It is on another device, or must not be written.
    """
    if found_inf is None:
        return
    # A nested tensor has no shape to name: the check below refuses it.
    if (isinstance(found_inf, Tensor) and not found_inf.is_nested) and not (
        found_inf.dtype == torch.float32 and found_inf.numel() == 1
    ):
        raise TypeError(
            "found_inf must be one float32, torch.zeros((), dtype=torch.float32, device=...), got "
            f"shape {tuple(found_inf.shape)} {found_inf.dtype}"
        )
    tensor = check_tensor("found_inf", found_inf)
    if tensor.device != device:
        raise ValueError(f"found_inf is on {tensor.device} but the tensors are on {device}")
    check_writable("found_inf", tensor)

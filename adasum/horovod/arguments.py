"""Helpers of Horovod's functions: signatures, checks of arguments, and names of calls."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from adasum.handle import Handle
from collectives import Group, validation

P = ParamSpec("P")
R = TypeVar("R")
# Started calls by group, function and name. The group holds the work of unfinished calls.
_under_way: weakref.WeakKeyDictionary[Group, Any] = weakref.WeakKeyDictionary()


def with_arguments_of(
    model: Callable[P, Any], without: str = ""
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator that gives a function the signature of `model`, less one parameter.

    The function receives all arguments by name, with defaults filled in. Type checkers do not see
    that the parameter `without` is missing.
    """
    signature = inspect.signature(model)
    kept = [each for name, each in signature.parameters.items() if name != without]
    return functools.partial(_with_signature, signature.replace(parameters=kept))


def with_tensors_for(
    model: Callable[Concatenate[Tensor, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Sequence[Tensor], P], R]]:
    """Return a decorator like `with_arguments_of`, but the first argument is a list `tensors`."""
    signature = inspect.signature(model)
    first, *others = signature.parameters.values()
    first = first.replace(name="tensors", annotation="Sequence[Tensor]")
    return functools.partial(_with_signature, signature.replace(parameters=[first, *others]))


def waiting_for(start: Callable[P, Handle[R]]) -> Callable[P, R]:
    """Return a blocking version of `start`; its name lacks "_async"."""
    signature = inspect.signature(start)
    returned = str(signature.return_annotation).removeprefix("Handle[")[:-1]

    begin: Callable[..., Handle[R]] = start

    def call(**given: Any) -> R:
        return begin(**given).wait()

    call.__name__ = call.__qualname__ = start.__name__.replace("_async", "")
    call.__module__, call.__doc__ = start.__module__, f"Do as `{start.__name__}`, and wait for it."
    call.__annotations__["return"] = returned
    return _with_signature(signature, call)


def _with_signature(signature: inspect.Signature, function: Callable[..., R]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    returned = inspect.signature(function).return_annotation
    vars(call)["__signature__"] = signature.replace(return_annotation=returned)
    return call


def require(argument: str, value: object, *types: type) -> None:
    """Raise TypeError unless the value has one of the types; a bool is not an int."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(each.__name__ for each in types)
        raise TypeError(f"{argument} must be of type {names}, got {type(value).__name__}")


def dense(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Return the tensor; raise unless it is a dense, initialised tensor in memory."""
    validation.no_mode(argument)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ValueError(f"{argument} is an uninitialised parameter: call its module once first")
    validation.plain(argument, tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{argument} must be dense, got {tensor.layout}: pass its to_dense()")
    return tensor


def tensor_list(tensors: object) -> list[Any]:
    """Return the tensors as a list; refuse a single tensor, which would iterate over rows."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def copied(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Return a contiguous copy, detached from autograd."""
    return dense(tensor, argument).detach().clone(memory_format=torch.contiguous_format)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor detached and contiguous, copied only if it is not already."""
    return dense(tensor).detach().resolve_conj().resolve_neg().contiguous()


def start_each(
    start: Callable[..., Handle[R]], tensors: object, name: str | None, **options: Any
) -> Handle[list[R]]:
    """Start one call per tensor, with its number added to the name; return one handle for all.

    All tensors are checked before the first call, so that no rank makes only some of the calls.
    """
    checked = [dense(each, f"tensors[{i}]") for i, each in enumerate(tensor_list(tensors))]
    for i, each in enumerate(checked):
        if not each.dim():
            raise ValueError(f"tensors[{i}] must have a first dimension: use reshape(1)")
    names = [None if name is None else f"{name}.{i}" for i in range(len(checked))]
    works = [start(*each, **options) for each in zip(checked, names, strict=True)]
    return Handle(works, lambda *results: list(results))


def start_named(
    kind: str, group: Group, name: str | None, call: Callable[..., Any], *args: Any, **options: Any
) -> Handle[Any]:
    """Start an asynchronous call and return its handle.

    `kind` is the function's name; calls of different kinds may share a name. Raises ValueError,
    and starts nothing, while a call of this kind and name is under way in the group.
    """
    named = _under_way.setdefault(group, weakref.WeakValueDictionary())
    earlier = named.get((kind, name)) if isinstance(name, str) else None
    if earlier is not None and not earlier.is_completed():
        raise ValueError(
            f"name {name!r} is in use by another {kind} that is still under way: call synchronize "
            "on its handle first, or pass another name"
        )
    work = call(*args, name=name, async_op=True, **options)
    if isinstance(name, str):
        named[kind, name] = work
    return Handle([work], lambda result: result)

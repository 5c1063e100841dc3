"""Operations under way, and what all of Horovod's functions check of their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from collectives import Average, Reducer, Sum, Work

__all__ = ["Handle", "poll", "synchronize"]


class Handle:
    """An operation under way, as the `_async` functions return it."""

    def __init__(self, work: Work | Any, finish: Callable[[Any], Any]) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> Any:
        """The answer; raises what went wrong. May be called again."""
        return self._finish(self._work.wait())

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()


class _Several:
    """What a Handle needs of a Work, for many."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> list[Any]:
        return [handle.wait() for handle in self._handles]

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def together(handles: Sequence[Handle]) -> Handle:
    """One handle for the list of all answers."""
    return Handle(_Several(handles), lambda answers: answers)


def require(argument: str, value: object, *kinds: type) -> None:
    """TypeError for a value of none of these kinds; a bool is no int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{argument} must be of type {names}, not {type(value).__name__}")


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation; returns its answer."""
    return _handle(handle).wait()


def poll(handle: Handle) -> bool:
    """True once `synchronize(handle)` would not block."""
    return _handle(handle).is_completed()


def _handle(handle: Any) -> Any:
    if not (hasattr(handle, "wait") and hasattr(handle, "is_completed")):
        raise TypeError(
            f"handle must be what an _async function returned, not {type(handle).__name__}"
        )
    return handle


def checked(tensor: Tensor) -> Tensor:
    """The tensor; TypeError for what is no dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ValueError("tensor is an uninitialised parameter: call its module once first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def listed(tensors: object) -> list[Any]:
    """The tensors as a list; TypeError for one tensor, whose rows would pass for a list."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of tensors, not {type(tensors).__name__}")
    return list(tensors)


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy outside autograd."""
    return checked(tensor).detach().clone(memory_format=torch.contiguous_format)


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor outside autograd, copied where its memory does not hold its values in order."""
    return checked(tensor).detach().resolve_conj().resolve_neg().contiguous()


def operation(op: Reducer | None, average: bool | None = None) -> Reducer:
    """What `op`, or Horovod's deprecated `average`, stands for; Average where neither is given."""
    if average is not None:
        if not isinstance(average, bool | int):
            raise TypeError(f"average must be a bool, not {type(average).__name__}")
        if op is not None:
            raise ValueError("the op parameter supersedes average: give only op")
        warnings.warn(
            "parameter average is deprecated: use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, Reducer):
        raise TypeError(f"op must be Sum, Average or Adasum, not {op!r}")
    return op


def differentiable(*tensors: Tensor) -> bool:
    """Whether autograd is to record what happens to one of these."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def refuse_gradient(what: str, *tensors: Tensor) -> None:
    """NotImplementedError where a gradient would silently be lost."""
    if differentiable(*tensors):
        raise NotImplementedError(
            f"gradients through {what}_async are not supported: pass tensor.detach(), or call "
            f"{what}"
        )


def backward_name(name: str | None) -> str | None:
    """What the reduction of the gradient of `name` is called."""
    return None if name is None else f"{name}.backward"

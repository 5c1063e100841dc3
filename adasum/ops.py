"""Horovod's functions on tensors: allreduce, allgather, broadcast and their kin."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from collectives import Average, Reducer, Sum, Work, default_group

__all__ = [
    "Handle",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]


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


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation; returns its answer."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """True once `synchronize(handle)` would not block."""
    return handle.is_completed()


def barrier(process_set: None = None) -> None:
    """Returns once every rank has called it."""
    _refuse_process_set(process_set)
    default_group().barrier()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """A new tensor: the tensor of every rank reduced by `op` (Average unless given).

    With op=Adasum the whole tensor is one segment. `average` is Horovod's deprecated way to say
    Average (True) or Sum (False). Gradients flow through Sum and Average: that of the answer is
    reduced in the same way. Collective; TypeError, ValueError for bad arguments.
    """
    op = _operation(op, average)
    _refuse_process_set(process_set)
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        if op not in (Sum, Average):
            raise NotImplementedError(
                f"gradients through allreduce with op={op} are not supported: pass tensor.detach()"
            )
        return _Allreduce.apply(tensor, name, compression, op, prescale_factor, postscale_factor)
    return _start([tensor], name, compression, op, prescale_factor, postscale_factor).wait()[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """As `allreduce`, without gradients; the answer comes from `synchronize`."""
    op = _operation(op, average)
    _refuse_process_set(process_set)
    _refuse_gradient("allreduce_async", tensor)
    handle = _start([tensor], name, Compression.none, op, prescale_factor, postscale_factor)
    return Handle(handle, lambda tensors: tensors[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """As `allreduce`, in place on a contiguous tensor, which is returned."""
    return allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """As `allreduce_`; the tensor must not be touched until `synchronize`."""
    handle = grouped_allreduce_async_(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return Handle(handle, lambda tensors: tensors[0])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> list[Tensor]:
    """As `allreduce` of each tensor (Adasum: each its own segment), packed into few messages.

    Without gradients: NotImplementedError for tensors that require them.
    """
    op = _operation(op, average)
    _refuse_process_set(process_set)
    _refuse_gradient("grouped_allreduce", *tensors)
    return _start(tensors, name, compression, op, prescale_factor, postscale_factor).wait()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """As `grouped_allreduce`; the list of answers comes from `synchronize`."""
    op = _operation(op, average)
    _refuse_process_set(process_set)
    _refuse_gradient("grouped_allreduce_async", *tensors)
    return _start(tensors, name, Compression.none, op, prescale_factor, postscale_factor)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> list[Tensor]:
    """As `grouped_allreduce`, in place on contiguous tensors, which are returned."""
    return grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """As `grouped_allreduce_`; the tensors must not be touched until `synchronize`."""
    op = _operation(op, average)
    _refuse_process_set(process_set)
    given = list(tensors)
    work = default_group().grouped_all_reduce(
        # In place on a parameter is meant to change its value, not to be recorded by autograd.
        [_checked(tensor).detach() for tensor in given],
        op,
        name=name,
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(work, lambda _: given)


def allgather(tensor: Tensor, name: str | None = None, process_set: None = None) -> Tensor:
    """The tensors of all ranks, joined along dimension 0, where their sizes may differ."""
    return allgather_async(tensor, name, process_set).wait()


def allgather_async(tensor: Tensor, name: str | None = None, process_set: None = None) -> Handle:
    """As `allgather`; the answer comes from `synchronize`."""
    _refuse_process_set(process_set)
    _refuse_gradient("allgather", tensor)
    work = default_group().all_gather(_checked(tensor).contiguous(), name=name, async_op=True)
    return Handle(work, lambda answer: answer)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Tensor:
    """A new tensor on every rank: the one of `root_rank`."""
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """As `broadcast`; the answer comes from `synchronize`."""
    _refuse_gradient("broadcast", tensor)
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Tensor:
    """Overwrites the contiguous tensor with that of `root_rank`, and returns it."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """As `broadcast_`; the tensor must not be touched until `synchronize`."""
    _refuse_process_set(process_set)
    work = default_group().broadcast(
        _checked(tensor).detach(), root=root_rank, name=name, async_op=True
    )
    return Handle(work, lambda _: tensor)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return _start([tensor], *arguments).wait()[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Each rank's loss depends on every rank's tensor by the same scales: the transpose of the
        # reduction is the reduction itself.
        name, *rest = ctx.arguments
        name = None if name is None else f"{name}.backward"
        reduced = _start([gradients[0]], name, *rest).wait()[0]
        return reduced, *(None for _ in ctx.arguments)


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: Reducer,
    prescale: float,
    postscale: float,
) -> Handle:
    """An out-of-place grouped all-reduce; its answer is the list of decompressed tensors."""
    wire: list[Tensor] = []
    contexts: list[Any] = []
    for tensor in tensors:
        short, ctx = compression.compress(_copy(tensor))
        wire.append(short)
        contexts.append(ctx)
    work = default_group().grouped_all_reduce(
        wire, op, name=name, prescale=prescale, postscale=postscale, async_op=True
    )
    return Handle(
        work,
        lambda answer: [
            compression.decompress(short, ctx) for short, ctx in zip(answer, contexts, strict=True)
        ],
    )


def _copy(tensor: Tensor) -> Tensor:
    return _checked(tensor).detach().clone(memory_format=torch.contiguous_format)


def _checked(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def _operation(op: Reducer | None, average: bool | None) -> Reducer:
    if average is not None:
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


def _refuse_process_set(process_set: None) -> None:
    if process_set is not None:
        raise NotImplementedError("process_set is not supported yet: pass process_set=None")


def _refuse_gradient(what: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    ):
        raise NotImplementedError(
            f"gradients through {what} are not supported yet: pass tensor.detach()"
        )

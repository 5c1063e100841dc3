"""Persistent requests: a collective that is checked and planned once, and started repeatedly.

The meaning is that of MPI-4's persistent collectives (MPI_Allreduce_init, MPI_Start, MPI_Wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from collectives import validation
from collectives.calls import Calls
from collectives.compiling import untraced
from collectives.execution.call import Call
from collectives.work import Work

Tensor = torch.Tensor
# What the direct call returns.
T_co = TypeVar("T_co", covariant=True)


@untraced
class Request(Generic[T_co]):
    """A collective on a rank's buffers that can be started again and again.

    ::

        request = group.all_reduce_init(flat, Sum)
        for _ in range(steps):
            ...
            request.start()
            ...
            request.wait()

    All ranks start their requests in one order, between the other calls of the group. A rank that
    starts another request than its peers, or makes another call, is a CollectiveMismatchError on
    all ranks, naming both; the group and the request stay usable, and the buffers are as they were
    before `start`.

    From `start` to `wait` the buffers must be neither read nor written, nor resized or given other
    memory (`resize_`, `set_`, `.data =`). Where that has happened before, `start` raises: a request
    holds what it was made for, and takes other memory, of the same tensor too, by `start(tensor)`.
    Of threads that start it at once one does, and the others get the error of a second start.

    The group's communication thread carries it out from `start` on. Where that has not begun when
    `wait` is called, the thread that waits does it, which saves two thread switches.
    """

    def __init__(self, calls: Calls, call: Call, *, negotiate: bool = True) -> None:
        self._calls = calls
        self._work: Work[T_co] | None = None
        # Under 0 who has started it: setdefault is atomic, so of several threads it is one.
        self._started_by: dict[int, object] = {}
        self._closed = False
        self._bind(calls.number(call) if negotiate else call)

    def __repr__(self) -> str:
        return f"Request({self._call})"

    def _bind(self, call: Call) -> None:
        self._call = call
        self._kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in call.tensors]
        self._memory = [(tensor, *_memory_of(tensor)) for tensor in call.memory]
        self._calls.plan(call)

    def start(self, tensor: Tensor | Sequence[Tensor] | None = None) -> Work[T_co]:
        """Start the collective.

        Args:
            tensor: Another buffer from now on, of the same shape, dtype and device; for a grouped
                request a list of them. Other ranks need not change theirs.

        Returns:
            Its Work, for callbacks and for who else waits; `wait` has to be called in any case.

        Raises:
            RuntimeError: Where it was started and not waited for, is closed, or has no buffer.
            TypeError, ValueError: Where `tensor` is no such buffer, or a buffer has other memory
                than when it was passed; nothing is started.
        """
        self._check_open()
        me = object()
        try:
            if self._started_by.setdefault(0, me) is not me:
                raise RuntimeError(f"{self!r} was started already: call wait() first")
            if tensor is not None:
                self._rebind([tensor] if isinstance(tensor, Tensor) else tensor)
            if not self._call.tensors and self._kinds:
                raise RuntimeError(f"{self!r} has released its buffers: pass start() others")
            if tensor is None:
                self._check_memory()
            self._work = work = self._calls.start(self._call)
        except BaseException:
            if self._started_by.get(0) is me:
                del self._started_by[0]
            raise
        return work

    def _check_memory(self) -> None:
        """Raise ValueError where a buffer's memory, shape or dtype is not what was passed."""
        for number, (tensor, address, shape, dtype) in enumerate(self._memory):
            if (
                tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or not tensor.is_contiguous()
            ):
                now, other, kind = _memory_of(tensor)
                raise ValueError(
                    f"tensor {number} of {self!r} has other memory than when it was passed, as by "
                    f"set_(), resize_() or .data = (shape {tuple(other)} {kind} at {now:#x}, "
                    f"was {tuple(shape)} {dtype} at {address:#x}): pass it to start() again"
                )

    def _rebind(self, tensors: Sequence[Tensor]) -> None:
        tensors = validation.tensor_list("tensor", tensors)
        if len(tensors) != len(self._kinds):
            raise ValueError(f"{self!r} is of {len(self._kinds)} tensors, got {len(tensors)}")
        for (shape, dtype, device), new in zip(self._kinds, tensors, strict=True):
            if (shape, dtype, device) != (new.shape, new.dtype, new.device):
                raise ValueError(
                    f"tensor must be like the request's, shape {tuple(shape)} {dtype} on "
                    f"{device}, got shape {tuple(new.shape)} {new.dtype} on {new.device}"
                )
        self._bind(replace(self._call, tensors=tensors))

    def wait(self) -> T_co:
        """Block until the collective has ended; return what the direct call returns.

        On CUDA this orders the current stream behind the collective instead of blocking the host.

        Raises:
            RuntimeError: Where it was not started, or is closed.
            CollectiveError: What went wrong with the collective.
        """
        work = self._started()
        try:
            return work.wait()
        finally:
            if work.has_ended() and self._work is work:
                self._work = None
                self._started_by.pop(0, None)

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting.

        Raises:
            RuntimeError: Where it was not started, or is closed.
        """
        return self._started().is_completed()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when what was started has ended, as `Work.add_done_callback`."""
        self._started().add_done_callback(callback)

    def release(self) -> None:
        """Let go of the buffers; the next start takes others. Other ranks need not release theirs.

        Raises:
            RuntimeError: Where it was started and not waited for.
        """
        if self._work is not None:
            raise RuntimeError(f"{self!r} was started: call wait() first")
        self._call = replace(self._call, tensors=(), shared=None)
        self._memory = []

    def close(self) -> None:
        """Let go of the buffers; it cannot be started again. Other ranks need not close theirs.

        Raises:
            RuntimeError: Where it was started and not waited for.
        """
        self.release()
        self._closed = True

    def _started(self) -> Work[T_co]:
        self._check_open()
        if self._work is None:
            raise RuntimeError(f"{self!r} was not started: call start() first")
        return self._work

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r} was closed: make another one")


def _memory_of(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Return what a request relies on: where a contiguous tensor lies, and of what it is."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype

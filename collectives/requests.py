"""Persistent requests: a collective that is checked and planned once, and started repeatedly.

They correspond to MPI-4's persistent collectives (MPI_Allreduce_init, MPI_Start, MPI_Wait).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

import torch

from collectives import validation
from collectives.call import Call
from collectives.calls import Calls
from collectives.modes import untraced_methods
from collectives.reducers import Reducer
from collectives.work import T_co, Work

Tensor = torch.Tensor


@untraced_methods
class Request(Generic[T_co]):
    """A collective on this rank's buffers that can be started any number of times.

    ::

        request = group.all_reduce_init(flat, Sum)
        for _ in range(steps):
            ...
            request.start()
            ...
            request.wait()

    All ranks start their requests, and make the group's other calls, in the same order. If any rank
    starts another request than its peers, or makes another call, all ranks raise a
    CollectiveMismatchError that names both; the group and the request stay usable, and the buffers
    keep their values from before `start`.

    From `start` to `wait` the buffers must not be read, written, resized or given other memory
    (`resize_`, `set_`, `.data =`). If a buffer was given other memory before `start`, `start`
    raises: pass the tensor again by `start(tensor)`. If several threads start a request at once,
    one of them succeeds and the others get the error of a second start.

    On GPUs the second or a later start may take some milliseconds, or wait up to a tenth of a
    second for the other ranks: it is captured in a CUDA graph, and later starts launch this graph
    (docs/groups.md).

    The group's communication thread carries out the request. If it has not begun when `wait` is
    called, the waiting thread carries it out itself, which saves two thread switches.

    Examples:
        >>> def accumulate(group):
        ...     gradient = torch.ones(2)
        ...     request = group.all_reduce_init(gradient)
        ...     for _ in range(2):
        ...         request.start()
        ...         request.wait()
        ...     return gradient
        >>> collectives.run_threads(2, accumulate)
        [tensor([4., 4.]), tensor([4., 4.])]
    """

    def __init__(self, calls: Calls, call: Call, *, negotiate: bool = True) -> None:
        self._calls = calls
        # Held from `start` until `wait` has ended.
        self._started = threading.Lock()
        self._work: Work[T_co] | None = None
        self._closed = False
        self._kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in call.tensors]
        self._bind(calls.number(call) if negotiate else call)

    def __repr__(self) -> str:
        return f"Request({self._call})"

    @property
    def op(self) -> Reducer:
        """The operator; meaningless for requests without a reduction."""
        return self._call.op

    def _bind(self, call: Call, last: Call | None = None) -> None:
        self._call = call
        self._memory = [
            (tensor, tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in call.memory
        ]
        self._calls.plan_request(call, last)

    def start(self, tensor: Tensor | Sequence[Tensor] | None = None) -> Work[T_co]:
        """Start the collective.

        Args:
            tensor: A buffer to use from now on, of the same shape, dtype and device; for a grouped
                request a list of them. Other ranks need not change theirs.

        Returns:
            The Work, for callbacks and other waiting threads; the request's `wait` must still be
            called.

        Raises:
            RuntimeError: It was started and not waited for, is closed, or has no buffer.
            TypeError, ValueError: `tensor` is not such a buffer, or a buffer's memory has changed
                since it was passed; nothing is started.
        """
        self._check_open()
        if not self._started.acquire(blocking=False):
            raise RuntimeError(f"{self!r} was started already: call wait() first")
        try:
            if isinstance(tensor, Tensor):
                validation.tensor("tensor", tensor)
                self._rebind([tensor])
            elif tensor is not None:
                self._rebind(validation.tensor_list("tensor", tensor))
            elif not self._call.tensors and self._kinds:
                raise RuntimeError(
                    f"{self!r} has released its buffers: call start(tensor) with new ones"
                )
            else:
                self._check_memory()
            self._work = work = self._calls.start(self._call)
        except BaseException:
            self._started.release()
            raise
        return work

    def _check_memory(self) -> None:
        """Raise ValueError if a buffer's memory, shape or dtype has changed since it was passed."""
        for number, (tensor, address, shape, dtype) in enumerate(self._memory):
            if (
                tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"tensor {number} of {self!r} has other memory than when it was passed, as by "
                    f"set_(), resize_() or .data = (shape {tuple(tensor.shape)} {tensor.dtype} at "
                    f"{tensor.data_ptr():#x}, was {tuple(shape)} {dtype} at {address:#x}): pass it "
                    "to start() again"
                )

    def _rebind(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self._kinds):
            raise ValueError(f"{self!r} has {len(self._kinds)} tensors, got {len(tensors)}")
        for (shape, dtype, device), new in zip(self._kinds, tensors, strict=True):
            if (shape, dtype, device) != (new.shape, new.dtype, new.device):
                raise ValueError(
                    f"tensor must be like the request's, shape {tuple(shape)} {dtype} on "
                    f"{device}, got shape {tuple(new.shape)} {new.dtype} on {new.device}"
                )
            if self._call.out is not None:
                validation.apart("tensor", new, "out", self._call.out)
        # The new call has no plan yet: planning may fail.
        self._bind(self._call.of(tensors), self._call)

    def wait(self) -> T_co:
        """Block until the collective has ended; return the direct call's result.

        On CUDA this makes the current stream wait for the collective; the host is not blocked.

        Raises:
            RuntimeError: It was not started, or is closed.
            CollectiveError: The collective failed.
        """
        work = self._under_way()
        try:
            result: T_co = self._calls.queue.result(work)
            return result
        finally:
            # After an interrupted wait the request is still under way, and needs another wait.
            if work._ended and self._work is work:
                self._work = None
                self._started.release()

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting.

        Raises:
            RuntimeError: It was not started, or is closed.
        """
        return self._under_way().is_completed()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when this start has ended: `Work.add_done_callback`."""
        self._under_way().add_done_callback(callback)

    def release(self) -> None:
        """Release the buffers; the next start needs others. Other ranks need not do the same.

        Raises:
            RuntimeError: It was started and not waited for.
        """
        if self._work is not None:
            raise RuntimeError(f"{self!r} was started: call wait() first")
        # The next buffers may be other memory at the same address, but NCCL may have registered
        # the old memory for a graph.
        plan, self._call = self._call.plan, self._call.of(())
        self._call.replay = None
        if plan is not None:
            plan.release()
            self._call.plan = plan
        self._memory = []

    def close(self) -> None:
        """Release the buffers; it cannot be started again. Other ranks need not do the same.

        Raises:
            RuntimeError: It was started and not waited for.
        """
        self.release()
        self._call, self._closed = replace(self._call, plan=None, launches=None), True

    def _under_way(self) -> Work[T_co]:
        self._check_open()
        if self._work is None:
            raise RuntimeError(f"{self!r} was not started: call start() first")
        return self._work

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r} was closed: make another one")

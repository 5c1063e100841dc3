"""Work: the handle by which a caller waits for an asynchronous collective."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from collectives.errors import CollectiveError
from collectives.modes import inference_mode, untraced


class _Queue(Protocol):
    """The part of `CallQueue` that a Work uses."""

    changed: threading.Condition

    def result(self, work: Work[Any]) -> Any: ...
    def note(self, error: BaseException) -> None: ...
    def check_streams(self) -> None: ...
    def check_process(self, what: str) -> None: ...


# The type that the synchronous call returns.
T_co = TypeVar("T_co", covariant=True)


@untraced
class Work(Generic[T_co]):
    """A collective under way.

    `wait()` returns what the synchronous call would return, or raises what it would raise. On CUDA
    it makes the current stream wait for the collective and does not block the host. An error after
    that, such as a rank that never comes, is raised by later waits and by the group's next call.

    The group's communication thread carries the collective out, or a thread that waits for it; an
    interrupt of that thread then interrupts the call, which ends the group. The communication
    thread may keep a reference to the tensors until it runs the next call.

    Until `wait()` returns the tensors must keep their values, shapes and memory, as in torch's own
    collectives: a storage that is resized meanwhile may end the process.

    Examples:
        >>> def overlapped(group):
        ...     work = group.all_reduce(torch.ones(2), async_op=True)
        ...     return work.wait()
        >>> collectives.run_threads(2, overlapped)
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    def __init__(
        self,
        queue: _Queue,
        title: str,
        function: Callable[[], Any],
        streams: Sequence[torch.cuda.Stream] = (),
        due: float = 0.0,
    ) -> None:
        self.title = title
        self._queue = queue
        self._function: Callable[[], Any] | None = function
        self._streams = streams
        # When the communication thread takes it, by time.monotonic().
        self.due = due
        self._inference = torch.is_inference_mode_enabled()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Recorded after the collective, one for each device that it is on.
        self._events: list[torch.cuda.Event] = []
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> T_co:
        """Block until the collective has ended; each of its steps is bounded by the timeout.

        Raises:
            TransportError: No thread can end it any more, as in a process that was forked from the
                rank; or this thread is inside a call of the same group.
        """
        result: T_co = self._queue.result(self)
        return result

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting.

        Raises:
            TransportError: It is not, in a process that was forked from the rank.
        """
        self._check_process()
        if not self._ended or all(event.query() for event in self._events):
            return self._ended
        try:
            self._queue.check_streams()
        except CollectiveError:
            return True
        return False

    def error(self) -> BaseException | None:
        """Return the collective's error, if it has ended with one."""
        return self._error

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, with or without an error."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, with or without an error.

        It is called in the communication thread, or at once in this one if the collective has ended
        already, and the collective's CUDA stream is current. It must not wait for a collective of
        the same group. Errors that it raises in the other thread go to threading.excepthook.

        Raises:
            TransportError: The collective has not ended, and this process was forked from the rank.
        """
        self._check_process()
        with self._queue.changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        with _current(self._streams):
            callback()

    def _run(self) -> None:
        """Carry out the call and keep its result, or its error, for `wait()`."""
        assert self._function is not None
        with torch.no_grad(), inference_mode(self._inference), _current(self._streams):
            try:
                self._result = self._function()
                self._events = [stream.record_event() for stream in self._streams]
            except BaseException as error:  # noqa: BLE001 - wait() raises it
                self._fail(error)
            else:
                self._end()

    def _fail(self, error: BaseException) -> None:
        """End the collective with an error for `wait()`, unless it has ended."""
        if not self._ended:
            self._error = error
            self._queue.note(error)
            self._end()

    def _end(self) -> None:
        self._function = None
        with self._queue.changed:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
            self._queue.changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                # As an error that ends a thread. The user's own hook may raise.
                with suppress(BaseException):
                    said = (*sys.exc_info(), threading.current_thread())
                    threading.excepthook(threading.ExceptHookArgs(said))

    def _check_process(self) -> None:
        if not self._ended:
            self._queue.check_process("this call")


def _current(streams: Sequence[torch.cuda.Stream]) -> AbstractContextManager[object]:
    """Return a context with these streams current, and the device of the first one."""
    if not streams:
        return nullcontext()
    current = ExitStack()
    # Entering a stream also makes its device current: the first one's last, so that it stays.
    for stream in reversed(streams):
        current.enter_context(torch.cuda.stream(stream))
    return current


def on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    # Results may be a tensor, several, or none, as of a barrier.
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]

"""Work: the handle by which a caller waits for an asynchronous collective."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from collectives.compiling import untraced
from collectives.errors import CollectiveError, CollectiveMismatchError, TransportError
from collectives.trace import recording, span
from collectives.validation import active_mode

# How often a waiting thread checks that there still is a thread that can end its wait.
CHECK_SECONDS = 1.0


class _Worker(Protocol):
    """The part of `collectives.worker.Worker` that a Work uses."""

    check_streams: Callable[[], None]
    unraised: str

    def run_first(self, only: Work[Any] | None = None) -> bool: ...
    def check_waiting(self, work: Work[Any]) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def is_forked(self) -> bool: ...


# The type that the synchronous call returns.
T_co = TypeVar("T_co", covariant=True)


@untraced
class Work(Generic[T_co]):
    """A collective under way.

    `wait()` returns what the synchronous call would return, or raises what it would raise. On CUDA
    it makes the current stream wait for the collective and does not block the host. An error after
    that, such as a rank that never comes, is raised by later waits and by the group's next call.

    The communication thread carries the collective out. If it is a small one in shared memory, the
    first thread that waits may carry it out instead, and an interrupt of that thread then
    interrupts the call. The communication thread may keep a reference to the tensors until it runs
    the next call.

    Until `wait()` returns the tensors must keep their values, shapes and memory, as in torch's own
    collectives: a storage that is resized meanwhile may end the process.

    Examples:
        >>> def overlapped(group):
        ...     work = group.all_reduce(torch.ones(2), async_op=True)
        ...     return work.wait()
        >>> collectives.run_threads(2, overlapped)
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    # What timelines call the collective.
    name = ""
    # Kind, name and time of the call, for the flight recorder while it is queued.
    call: tuple[str, str | None, int] | None = None

    def __init__(self) -> None:
        # Held until the collective has ended. Not an Event, which costs as much as a small sum.
        self._ending = threading.Lock()
        self._ending.acquire()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._streams: Sequence[torch.cuda.Stream] = ()
        # Recorded after the collective, one for each device that it is on.
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._callbacks: deque[Callable[[], None]] = deque()
        # The worker that carries it out, and whether the first thread that waits may do so instead.
        self._worker: _Worker | None = None
        self._claimable = False

    def wait(self) -> T_co:
        """Block until the collective has ended; each of its steps is bounded by the timeout.

        Raises:
            TransportError: No thread can end it any more, as in a process that was forked from the
                rank; or this thread is inside a call of the same group.
        """
        if not recording():
            return self._wait()
        with span(lambda: f"wait {self.name or 'for a call'}"):
            return self._wait()

    def _wait(self) -> Any:
        if not self._ended:
            self._check_process()
        # Not in this thread if there are callbacks, which the communication thread calls, or if a
        # mode of the user would intercept the call's operations.
        if self._claimable and self._worker is not None and not (self._callbacks or active_mode()):
            self._worker.run_first(self)
        self._wait_for_host()
        if self._error is not None:
            if self._worker is not None and self._worker.unraised == str(self._error):
                self._worker.unraised = ""
            raise self._error
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        if self._events:
            # The result may be allocated on the communication stream: the allocator must not use
            # its memory again before this stream has finished with it.
            for tensor in on_cuda(self._result):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if self._worker is not None:
                self._worker.check_streams()
        return self._result

    def _wait_for_host(self) -> None:
        worker = self._worker
        while not self._ended:
            if worker is not None:
                worker.check_waiting(self)
            # A thread that is interrupted between these two lines leaves the lock held. So the
            # others check `_ended` by themselves, at least every CHECK_SECONDS.
            if self._ending.acquire(timeout=CHECK_SECONDS):
                self._ending.release()

    def _check_process(self) -> None:
        """Raise TransportError if the thread that carries this out is in another process."""
        if not self._ended and self._worker is not None and self._worker.is_forked():
            raise TransportError(
                f"{self.name or 'this call'} was under way when this process was forked from a "
                "rank, which alone carries it out: wait for it there, or before the fork"
            )

    def is_completed(self) -> bool:
        """Whether `wait()` would return or raise without waiting.

        Raises:
            TransportError: It is not, in a process that was forked from the rank.
        """
        self._check_process()
        return self._ended and (
            all(event.query() for _, event in self._events) or self._streams_failed()
        )

    def _streams_failed(self) -> bool:
        """Whether wait() would raise an error of the collective on its stream."""
        try:
            if self._worker is not None:
                self._worker.check_streams()
        except CollectiveError:
            return True
        return False

    def was_carried_out(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._ended and self._error is None

    def error(self) -> BaseException | None:
        """Return the collective's error, if it has ended with one."""
        return self._error

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, with or without an error."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, with or without an error.

        It is called in the thread that carries the collective out, or at once in this one if the
        collective has ended already, and the collective's CUDA stream is current. It must not wait
        for a collective of the same group. Errors that it raises in the other thread go to
        threading.excepthook.

        Raises:
            TransportError: The collective has not ended, and this process was forked from the rank.
        """
        self._check_process()
        # Added before asking: whichever thread takes a callback out of the deque calls it, so that
        # it is called once though the collective may end at any moment.
        self._callbacks.append(callback)
        if self._ended:
            try:
                self._callbacks.remove(callback)
            except ValueError:
                # The thread that ended the collective has taken it.
                return
            with _current(self._streams):
                callback()

    def run(self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Carry out the call and keep its result or its error for `wait()`.

        Args:
            call: The collective.
            streams: The streams to make current, one for each device; the first one's device
                becomes current, too.
        """
        self._streams = streams
        with torch.no_grad(), ExitStack() as current:
            try:
                current.enter_context(_current(streams))
                self._result = call()
                for stream in streams:
                    self._events.append((stream.device, stream.record_event()))
            except CollectiveMismatchError as error:
                self._error = error
                if self._worker is not None:
                    self._worker.unraised = str(error)
            except BaseException as error:  # noqa: BLE001 - wait() raises it
                self._error = error
                if self._worker is not None:
                    self._worker.fail(error)
            finally:
                # Also after an interrupt: those that wait must not wait for ever.
                self._ended = True
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End the collective with an error for `wait()`, unless it has ended."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        """Wake the threads that wait, and call the callbacks."""
        # RuntimeError where it is released already, as after `fail`.
        with suppress(RuntimeError):
            self._ending.release()
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                # The thread that added it has seen the end, and calls it itself.
                return
            try:
                callback()
            except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                report_error()


@contextmanager
def _current(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make these streams current, one for each device, and the device of the first one."""
    with ExitStack() as current:
        # Entering a stream also makes its device current: the first one's last, so that it stays.
        for stream in reversed(streams):
            current.enter_context(torch.cuda.stream(stream))
        yield


def report_error() -> None:
    """Pass the error being handled to threading.excepthook, like one that ends a thread."""
    # The user may have set a hook, which may raise.
    with suppress(BaseException):
        said = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(said))


def on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    # Results may be a tensor, several, or none, as of a barrier.
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]

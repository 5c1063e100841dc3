"""What a caller of an asynchronous collective waits for."""

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

# How often whoever waits looks whether there still is a thread that could end the wait.
CHECK_SECONDS = 1.0


class Runs(Protocol):
    """What a Work needs of what runs it (`collectives.worker.Worker`)."""

    check_streams: Callable[[], None]

    def run_first(self, only: Work[Any] | None = None) -> bool:
        """Run the first job, of `only` where that is given; False where it is not to be had."""
        ...

    def check_waiting(self, work: Work[Any]) -> None:
        """Raise TransportError where nobody will end `work` while this thread waits for it."""
        ...

    def fail(self, error: BaseException) -> None:
        """Take note of what may have left a call half made."""
        ...

    # The text of a mismatch that no wait has raised yet.
    unraised: str

    def is_forked(self) -> bool:
        """Whether this process was forked from the one whose calls these are."""
        ...


# What the synchronous call returns.
T_co = TypeVar("T_co", covariant=True)


@untraced
class Work(Generic[T_co]):
    """A collective under way.

    `wait()` returns what the synchronous call would have returned, or raises what it would have
    raised. On CUDA it orders the current stream behind the collective instead of blocking the host;
    what ends a collective after that, such as a rank that never comes, is raised by later waits and
    by the group's next call.

    The communication thread carries it out; a small one on the host, of ranks that share memory,
    whoever waits first may, and an interrupt there comes within the call.
    The communication thread may refer to the tensors a moment longer, until it runs the next call.
    """

    # What timelines call the collective.
    name = ""

    def __init__(self) -> None:
        # Held until the collective has ended: an Event costs as much as a small sum.
        self._ending = threading.Lock()
        self._ending.acquire()
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._streams: Sequence[torch.cuda.Stream] = ()
        # Behind the collective, one for each device that it is on.
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._callbacks: deque[Callable[[], None]] = deque()
        # What ends it, and whether whoever waits for it first may run its job.
        self._worker: Runs | None = None
        self._claimable = False

    def wait(self) -> T_co:
        """Block until the collective has ended; every wait is bounded by the group's timeout.

        Raises:
            TransportError: Nobody is left to end it, as in a process that was forked from the
                rank, or this thread is inside a call of the group.
        """
        if not recording():
            return self._wait()
        with span(lambda: f"wait {self.name or 'for a call'}"):
            return self._wait()

    def _wait(self) -> Any:
        if not self._ended:
            self._check_process()
        # Callbacks are the communication thread's, and the user's modes this one's.
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
            # A result's memory may be of the communication stream, where nothing is behind what
            # the caller does with it.
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
            # Whoever is interrupted here leaves it held; the others look by themselves.
            if self._ending.acquire(timeout=CHECK_SECONDS):
                self._ending.release()

    def _check_process(self) -> None:
        """Raise TransportError where what will end this is in another process."""
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
        """Whether wait() would raise what ended the collective on its stream."""
        try:
            if self._worker is not None:
                self._worker.check_streams()
        except CollectiveError:
            return True
        return False

    def was_carried_out(self) -> bool:
        """Whether the collective has ended, and well."""
        return self._ended and self._error is None

    def error(self) -> BaseException | None:
        """Return what ended the collective, if anything has."""
        return self._error

    def has_ended(self) -> bool:
        """Whether the collective has ended on the host, well or not."""
        return self._ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the collective has ended, well or not.

        In the thread that ends it, or at once in this one where the collective has ended already;
        its CUDA stream is current. It must not wait for a collective of the same group. What it
        raises in the thread that ends the collective goes to threading.excepthook.

        Raises:
            TransportError: The collective has not ended, in a process forked from the rank.
        """
        self._check_process()
        self._callbacks.append(callback)
        if self._ended:
            try:
                self._callbacks.remove(callback)
            except ValueError:
                # Who has ended it has taken this one, too.
                return
            with _current(self._streams):
                callback()

    def run(self, call: Callable[[], Any], streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Carry out the call and keep its result or its error for `wait()`.

        Args:
            call: The collective.
            streams: Those to be current, one a device; so is the device of the first.
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
                self._ended = True
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End a collective that has not, with an error for `wait()`."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        """Wake those that wait, and call the callbacks."""
        with suppress(RuntimeError):
            self._ending.release()
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                # Who added it has seen the end, and calls it.
                return
            try:
                callback()
            except BaseException:  # noqa: BLE001 - the calls behind this one must go on
                report_error()


@contextmanager
def _current(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make these streams current, one a device, and the device of the first."""
    with ExitStack() as current:
        for stream in reversed(streams):
            current.enter_context(torch.cuda.stream(stream))
        yield


def report_error() -> None:
    """Hand the error being handled to threading.excepthook, as one that ends a thread."""
    # A hook of the user's may raise, too.
    with suppress(BaseException):
        said = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(said))


def on_cuda(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among a call's tensors, or in its result."""
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, torch.Tensor) and each.is_cuda]

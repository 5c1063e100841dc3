"""A group's calls, one after the other in the order in which they were made, each agreed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .agreement import agree
from .errors import CollectiveMismatchError, TransportError
from .runner import Runner
from .work import Worker


class Calls:
    """What carries out the calls of one rank.

    After a mismatch the ranks are still in step; after any other error raised while a call runs
    they are not, and every later call is a TransportError naming that error.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport
        self._worker = Worker(f"collectives-{self._transport.rank}")
        self._count = 0
        self._failure: BaseException | None = None
        self.closed = False

    def __call__(
        self,
        kind: str,
        name: str | None,
        entries: list[str],
        run: Callable[[str], Any],
        device: torch.device,
        async_op: bool,
    ) -> Any:
        """Agree on `entries` with the other ranks, then return what `run` returns, or a Work."""
        if self.closed:
            raise TransportError(f"{kind}: this group was shut down; call init() again")

        def call() -> Any:
            if self._failure is not None:
                raise TransportError(
                    f"{kind}: this group is unusable since an earlier failure: {self._failure}"
                ) from self._failure
            label = f"{kind} {name!r} (call {self._count})" if name else f"{kind} {self._count}"
            self._count += 1
            runner = self._runner
            try:
                if self._transport.size > 1:
                    agree(entries, self._transport, label, runner.timeout, runner.workspace)
                return run(label)
            except CollectiveMismatchError:
                raise
            except Exception as error:
                # The peers are in the middle of this call: the next one would meet its messages.
                self._failure = error
                raise

        if async_op:
            return self._worker.submit(call, device)
        return self._worker.call(call, device)

    def close(self) -> None:
        """Take no more calls; let the queued ones finish, and end the communication thread."""
        self.closed = True
        self._worker.close(self._runner.timeout)

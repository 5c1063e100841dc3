"""A group's calls, one after the other in the order in which they were made, each agreed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .agreement import Joined
from .consent import Consent
from .description import Description
from .errors import CollectiveMismatchError, TransportError
from .operations import OPERATIONS, WITH_JOINED, written_by
from .reducers import Average, Reducer, Sum
from .runner import Runner
from .work import Worker

_CPU = torch.device("cpu")


class Calls:
    """What carries out the calls of one rank.

    After a mismatch the ranks are still in step; after any other error raised while a call runs
    they are not, and every later call is a TransportError naming that error.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport
        self._consent = Consent(runner)
        self._worker = Worker(f"collectives-{self._transport.rank}")
        self._count = 0
        self._failure: BaseException | None = None
        self.closed = False

    def __call__(
        self,
        call: Description,
        tensors: list[torch.Tensor],
        op: Reducer = Sum,
        *,
        run: Callable[[], Any] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Agree on `call` with the other ranks, then return what its operation returns, or a Work.

        run: instead of an operation, for a call that no rank can have joined.
        """

        def work() -> Any:
            label = self._label(f"{call.kind} {call.name!r}" if call.name else call.kind)
            if run is not None:
                self._consent.agree(call, label)
                return run()
            return self._consent.carry_out(
                call,
                label,
                lambda: OPERATIONS[call.kind](self._runner, call, tensors, op, label),
                lambda: written_by(call, tensors),
            )

        return self._in_order(call.kind, work, tensors[0].device if tensors else _CPU, async_op)

    def join(self, operators: Iterable[Reducer], device: torch.device | None) -> int:
        """Take part in the other ranks' calls, with zeros, until all ranks have joined.

        Returns the rank that was the last to join, the highest of those that joined at once.
        """
        known = {str(op): op for op in (Sum, Average, *operators)}

        def work() -> int:
            if self._transport.size == 1:
                return self._transport.rank
            mine = Joined(self._count, known, WITH_JOINED)
            while True:
                agreed = self._consent.agree(mine, self._label("join"))
                if agreed.last is not None:
                    return agreed.last
                assert agreed.call is not None
                call = agreed.call
                zeros = [look.zeros(device) for look in call.tensors]
                op = known[call.options.get("op", str(Sum))]
                label = f"{call} (call {self._count - 1}, joined)"
                WITH_JOINED[call.kind](self._runner, call, zeros, op, label)

        answer: int = self._in_order("join", work, _CPU, False)
        return answer

    def _label(self, what: str) -> str:
        label = f"{what} (call {self._count})"
        self._count += 1
        return label

    def _in_order(
        self, kind: str, work: Callable[[], Any], device: torch.device, async_op: bool
    ) -> Any:
        """Do the work when its turn comes; remember a failure that leaves the group unusable."""
        if self.closed:
            raise TransportError(f"{kind}: this group was shut down; call init() again")

        def guarded() -> Any:
            if self._failure is not None:
                raise TransportError(
                    f"{kind}: this group is unusable since an earlier failure: {self._failure}"
                ) from self._failure
            try:
                return work()
            except CollectiveMismatchError:
                raise
            except Exception as error:
                # The peers are in the middle of this call: the next one would meet its messages.
                self._failure = error
                raise

        if async_op:
            return self._worker.submit(guarded, device)
        return self._worker.call(guarded, device)

    def close(self) -> None:
        """Take no more calls; let the queued ones finish, and end the communication thread."""
        self.closed = True
        self._worker.close(self._runner.timeout)

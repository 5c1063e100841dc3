"""How one rank comes to agree with the others on each of its group's calls, by the cheapest way.

- Ranks that share memory post what they call on a board (transport/board.py) and wait until all
  have posted the same: no message.
- Where they have agreed on the same call before, in a step that repeats, they do not wait either:
  the call runs at once, and its messages wait for the others as they do anyway. Its answer counts
  only after all have posted the same, at the end. Until then what it writes can be undone.
- What an all-reduce of up to 32 MiB needs of the others they show there with the call (shown.py),
  so that no message is left.
- By messages (agreement.py) where there is no board, where the board says that the ranks differ (to
  tell how), and as long as any rank has joined. One message agrees on the calls that are queued,
  too, where there is no board: a step that queues its buckets while they travel needs few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from collectives.consistency.agreement import AHEAD, CODE_BITS, Agreed, Joined, agree, code_of
from collectives.consistency.description import Description
from collectives.execution.all_reduce import Runner
from collectives.execution.executor import Workspace
from collectives.execution.shared_memory_all_reduce import Exhibit, Shown
from collectives.transport.shared_memory.symmetric_memory import (
    HASH_BITS,
    JOINED,
    Board,
    RanksDiffer,
)

# Of the calls agreed on, how many are remembered. Ranks need not remember the same ones.
_MOST = 4096
# Up to here a copy to undo the call with costs a few microseconds; beyond, waiting for the others
# first is little beside the call.
UNDO_BYTES = 256 * 1024


class Consent:
    """One rank's agreements. `agree` or `carry_out` is called once for every call of the group.

    upcoming: tells the calls queued behind this one, up to a number; None for what is no call that
    all ranks describe.
    """

    def __init__(
        self, runner: Runner, upcoming: Callable[[int], Sequence[Description | None]]
    ) -> None:
        self._runner = runner
        self._upcoming = upcoming
        self._ahead = 0
        self._codes: dict[Hashable, int] = {}
        self._known: dict[Hashable, int] = {}
        self._any_joined = False
        self._memory = Workspace()

    def agree(self, mine: Description | Joined, label: str) -> Agreed:
        """Return when all ranks that have not joined make one call, or all have joined.

        Raises CollectiveMismatchError, on every rank with the same text, where the calls differ or
        the joined ranks cannot take part.
        """
        if self._runner.transport.size == 1:
            return Agreed()
        board = self._runner.transport.board
        if board is None:
            if self._ahead:
                self._ahead -= 1
                return Agreed()
            return self._by_messages(mine, label, self._upcoming(AHEAD))
        key: Hashable = None
        code = JOINED
        if isinstance(mine, Description):
            key = mine.key
            code = self._known.get(key) or code_of(mine, HASH_BITS)
        board.enter(code)
        if self._any_joined:
            return self._by_messages(mine, label)
        try:
            if code == JOINED:
                raise RanksDiffer
            board.wait(_arrival(label), self._runner.timeout)
        except RanksDiffer:
            return self._settle(board, mine, label)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = code
        return Agreed()

    def carry_out(
        self,
        call: Description,
        label: str,
        work: Callable[[], Any],
        written: Callable[[], torch.Tensor | None],
        exhibit: Callable[[], Exhibit | None],
    ) -> Any:
        """Agree on a call and return what `work()` returns, which may be called twice.

        written: tells what it writes to, 1-D; None where it must not begin before an agreement.
        exhibit: tells what to show, where the call needs nothing else of the other ranks.
        """
        board = None if self._any_joined else self._runner.transport.board
        if board is not None and self._runner.transport.size > 1 and (show := exhibit()):
            return self._show(board, show, call, label, work)
        code = None if board is None else self._known.get(call.key)
        target = None if code is None else written()
        if board is None or code is None or target is None or target.nbytes > UNDO_BYTES:
            self.agree(call, label)
            return work()
        saved = self._memory.take(target.numel(), target).copy_(target)
        board.enter(code)
        board.watched = True
        try:
            result = work()
            board.wait(_arrival(label), self._runner.timeout)
        except RanksDiffer:
            board.watched = False
            target.copy_(saved)
            self._settle(board, call, label)
            return work()
        finally:
            board.watched = False
        return result

    def _show(
        self,
        board: Board,
        show: Exhibit,
        call: Description,
        label: str,
        work: Callable[[], Any],
    ) -> Any:
        show.fill(board.window(show.numel, show.dtype))
        if self.agree(call, label).joined:
            return work()
        windows = board.windows(show.numel, show.dtype)
        self._runner.shown = Shown(board, windows, show.way)
        try:
            return work()
        finally:
            self._runner.shown = None

    def _settle(self, board: Board, mine: Description | Joined, label: str) -> Agreed:
        """The ranks differ: clear what is under way, and find out how by messages."""
        board.clear(_arrival(label), self._runner.timeout)
        return self._by_messages(mine, label)

    def _by_messages(
        self,
        mine: Description | Joined,
        label: str,
        upcoming: Sequence[Description | None] = (),
    ) -> Agreed:
        # A mismatch ends all joins.
        self._any_joined = False
        code = 0 if isinstance(mine, Joined) else self._code(mine)
        queued = [self._code(call) for call in upcoming]
        runner = self._runner
        agreed = agree(
            mine, runner.transport, label, runner.timeout, runner.workspace, code, queued
        )
        self._any_joined = bool(agreed.joined)
        self._ahead = agreed.ahead
        return agreed

    def _code(self, call: Description | None) -> int:
        """What the agreement knows a call by; 0 for what is none."""
        if call is None:
            return 0
        key = call.key
        code = self._codes.get(key)
        if code is None:
            if len(self._codes) >= _MOST:
                self._codes.clear()
            code = self._codes[key] = code_of(call, CODE_BITS)
        return code


def _arrival(label: str) -> str:
    return f"step 0 (arrival) of the agreement on {label}"

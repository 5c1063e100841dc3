"""One rank's negotiation with the others about each of its group's calls, by the cheapest way.

- Ranks that share memory signal a code of what they call in its signal pads, and wait until all
  have signalled the same: no message.
- By messages where ranks share no memory, where the signalled codes differ (to tell how), and as
  long as any rank has joined.
- By the messages of the call itself, for a request that is started: they carry its code, and a
  receiver that expects another one raises RanksDiffer. Then all ranks drop what is under way, and
  negotiate by messages. Only where every rank's result depends on every rank's data, so that none
  ends its call before it is found that the ranks differ.
"""

from __future__ import annotations

from contextlib import suppress

from collectives.consistency.description import Description
from collectives.consistency.messages import Joined, Outcome, negotiate_by_messages
from collectives.execution.context import CallContext, Workspace
from collectives.transport.base import MAX_CALL_NUMBER, Transport, call_code
from collectives.transport.shared_memory.symmetric_memory import JOINED, RanksDiffer

_SAME_CALL = Outcome()


class Negotiation:
    """Finds out, once for every call of the group, whether all ranks make it.

    Args:
        transport: Between the ranks.
        timeout: Seconds that each step may wait for a peer.
        workspace: Memory for what is received.

    Attributes:
        movable: Whether the call is a named asynchronous one, whose place among the calls is the
            user's choice; errors name it first. Set by whoever runs the call.
    """

    def __init__(self, transport: Transport, timeout: float, workspace: Workspace) -> None:
        self._transport = transport
        self._timeout = timeout
        self._workspace = workspace
        self._any_joined = False
        self._calls = 0
        self.movable = False

    def negotiate(self, mine: Description | Joined, label: str) -> Outcome:
        """Return when all ranks that have not joined make one call, or all have joined.

        Raises:
            CollectiveMismatchError: On every rank with the same text, where the calls differ or
                the joined ranks cannot take part.
        """
        self.signal(mine)
        return self.wait(mine, label)

    def signal(self, mine: Description | Joined) -> None:
        """Do the first part of `negotiate`, which never waits."""
        # From 1, so that no call's code is 0: messages with that are not compared.
        self._calls = self._calls % MAX_CALL_NUMBER + 1
        memory = self._transport.symmetric_memory
        if memory is not None and self._transport.size > 1:
            memory.signal(mine.code if isinstance(mine, Description) else JOINED)

    def code_for_messages(self, mine: Description) -> int | None:
        """Return the code by which the call's own messages negotiate; None where they cannot."""
        transport = self._transport
        by_messages = transport.symmetric_memory is None and transport.size > 1
        if not by_messages or not transport.carries_codes or self._any_joined:
            return None
        return call_code(self._calls, mine.code)

    def flush(self, label: str) -> None:
        """Drop all messages under way, on all ranks: one has received another call's code."""
        self._transport.flush(f"step 0 (the ranks differ) of {label}", self._timeout)

    def wait(self, mine: Description | Joined, label: str) -> Outcome:
        """Do the rest of `negotiate`, after `signal`."""
        if self._transport.size == 1:
            return _SAME_CALL
        memory = self._transport.symmetric_memory
        if memory is None or self._any_joined or isinstance(mine, Joined):
            return self._by_messages(mine, label)
        # Outside of the `except`, so that a mismatch is the only error in a traceback.
        with suppress(RanksDiffer):
            memory.wait(f"step 0 (the ranks' arrival) of {label}", self._timeout)
            return _SAME_CALL
        return self._by_messages(mine, label)

    def _by_messages(self, mine: Description | Joined, label: str) -> Outcome:
        # A mismatch ends all joins.
        self._any_joined = False
        where, code = f"the negotiation of {label}", call_code(self._calls, 0)
        call = CallContext(self._transport, where, self._timeout, self._workspace, code)
        outcome: Outcome | None = None
        with suppress(RanksDiffer):
            outcome = negotiate_by_messages(mine, call, movable=self.movable)
        if outcome is None:
            # Another rank negotiates by its call's own messages.
            self.flush(label)
            outcome = negotiate_by_messages(mine, call, movable=self.movable)
        self._any_joined = bool(outcome.joined)
        return outcome

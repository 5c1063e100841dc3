"""One rank's negotiation with the others about each of its group's calls, by the cheapest way.

- Ranks that share memory signal a code of what they call in its signal pads, and wait until all
  have signalled the same: no message.
- By messages where ranks share no memory, where the signalled codes differ (to tell how), and as
  long as any rank has joined.
"""

from __future__ import annotations

from contextlib import suppress

from collectives.consistency.description import Description
from collectives.consistency.messages import Joined, Outcome, negotiate_by_messages
from collectives.execution.context import CallContext, Workspace
from collectives.transport.base import Transport
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
        memory = self._transport.symmetric_memory
        if memory is not None and self._transport.size > 1:
            memory.signal(mine.code if isinstance(mine, Description) else JOINED)

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
        where = f"the negotiation of {label}"
        call = CallContext(self._transport, where, self._timeout, self._workspace)
        outcome = negotiate_by_messages(mine, call, movable=self.movable)
        self._any_joined = bool(outcome.joined)
        return outcome

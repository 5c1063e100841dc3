"""What a collective raises when it cannot give the right answer."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Base of every error raised by a collective after its arguments were accepted."""


class CollectiveMismatchError(CollectiveError):
    """Ranks called different collectives, or one with differing shapes, dtypes, ops or scales.

    Raised on every rank with the same text; tensors are as they were, and the group stays usable.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer died or did not answer in time; the text names the peer and the step."""


class TransportError(CollectiveError):
    """The transport itself failed, or is used after it failed."""


def words(error: BaseException) -> str:
    """What an error says, else its kind."""
    return str(error) or type(error).__name__

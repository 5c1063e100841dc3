"""The errors that collectives raise."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Base class of the errors that a collective raises after its arguments were checked."""


class CollectiveMismatchError(CollectiveError):
    """Ranks made different calls, or the same one with different shapes, dtypes, ops or scales.

    Every rank raises it, with the same text. Tensors are unchanged, and the group stays usable.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer has ended, or did not answer in time.

    The text names the peer for which this rank waited, and the step. If it is known why no answer
    came, it follows after a colon: the rank that has ended may be this peer, or one for which that
    peer was waiting.
    """


class TransportError(CollectiveError):
    """The transport failed, or was used after a failure."""


def describe(error: BaseException) -> str:
    """Return the text of an error, or the name of its class if the text is empty."""
    return str(error) or type(error).__name__

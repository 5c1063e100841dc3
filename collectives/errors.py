"""Errors that collectives raise."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Base class of the errors that a collective raises after it has accepted its arguments."""


class CollectiveMismatchError(CollectiveError):
    """Ranks made different calls, or one with different shapes, dtypes, ops or scales.

    It is raised on every rank with the same text. Tensors are unchanged and the group stays usable.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer has ended or did not answer in time.

    The text names the peer that this rank waited for and the step, and says behind a colon why no
    answer came where that is known: which rank has ended, this peer or one that it waited for.
    """


class TransportError(CollectiveError):
    """The transport failed, or is used after it failed."""


def describe(error: BaseException) -> str:
    """Return what an error says, or its kind where it says nothing."""
    return str(error) or type(error).__name__

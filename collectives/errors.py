"""The errors that collectives raise."""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(RuntimeError):
    """Base class of errors that collectives raise after the check of their arguments."""


class CollectiveMismatchError(CollectiveError):
    """Ranks made different calls, or the same call with different shapes, dtypes, ops or scales.

    Every rank raises it, with the same text. Tensors are unchanged, and the group stays usable.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer has ended, or did not answer in time.

    The text names the peer that this rank waited for, and the step. The reason, if known, follows
    after a colon: the rank that has ended may be this peer, or one that this peer was waiting for.
    """


class TransportError(CollectiveError):
    """The transport failed, or was used after a failure."""


def describe(error: BaseException) -> str:
    """Return the error's text, or the name of its class if the text is empty."""
    return str(error) or type(error).__name__


def compact(ranks: Sequence[int]) -> str:
    """Return a text for ranks in the given order, such as "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)

"""The errors that collectives raise."""

from __future__ import annotations

from collections.abc import Sequence


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


def compact(ranks: Sequence[int]) -> str:
    """Return ranks in their order as errors name them, such as "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)

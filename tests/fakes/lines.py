"""Queues between the ranks of a fake, each made by whoever asks for it first."""

from __future__ import annotations

import queue
from typing import Any


class Lines(dict[Any, "queue.SimpleQueue[Any]"]):
    """A queue for each key.

    A defaultdict may make two for one key where two threads ask at once, and what one of them puts
    into the first never arrives.
    """

    def __missing__(self, key: Any) -> queue.SimpleQueue[Any]:
        return self.setdefault(key, queue.SimpleQueue())

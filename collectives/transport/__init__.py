"""Ways for ranks to exchange messages; all pass the checks of tests/multi_rank/conformance.py."""

from .base import Message, Transport
from .gloo import GlooTransport
from .hybrid import HybridTransport
from .rendezvous import open_links
from .shm import ShmTransport
from .threads import ThreadTransport, ThreadWorld

__all__ = [
    "GlooTransport",
    "HybridTransport",
    "Message",
    "ShmTransport",
    "ThreadTransport",
    "ThreadWorld",
    "Transport",
    "open_links",
]

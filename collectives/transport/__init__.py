"""Ways for ranks to exchange messages; all pass tests/collectives/test_transports.py."""

from .base import Message, Transport
from .gloo import GlooTransport
from .threads import ThreadTransport, ThreadWorld

__all__ = ["GlooTransport", "Message", "ThreadTransport", "ThreadWorld", "Transport"]

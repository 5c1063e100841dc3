"""Transports carry messages between ranks. All of them pass the same conformance test."""

from collectives.transport.base import Message, Transport
from collectives.transport.host import HostTransport
from collectives.transport.nccl.cupy_backend import load_nccl
from collectives.transport.nccl.transport import NcclTransport
from collectives.transport.process_groups import GlooTransport
from collectives.transport.threads import ThreadTransport, ThreadWorld

__all__ = [
    "GlooTransport",
    "HostTransport",
    "Message",
    "NcclTransport",
    "ThreadTransport",
    "ThreadWorld",
    "Transport",
    "load_nccl",
]

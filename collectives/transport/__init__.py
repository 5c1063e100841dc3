"""Ways for ranks to exchange messages; all pass the checks of tests/processes/conformance.py."""

from collectives.transport.base import Message, Transport
from collectives.transport.connections.connect import WAYS, open_links
from collectives.transport.connections.connections import LinkTransport
from collectives.transport.gloo import GlooTransport
from collectives.transport.hybrid import HybridTransport
from collectives.transport.nccl.calls import load_nccl
from collectives.transport.nccl.nccl import NcclTransport
from collectives.transport.process_groups import store_of, subgroup
from collectives.transport.threads import ThreadTransport, ThreadWorld

__all__ = [
    "WAYS",
    "GlooTransport",
    "HybridTransport",
    "LinkTransport",
    "Message",
    "NcclTransport",
    "ThreadTransport",
    "ThreadWorld",
    "Transport",
    "load_nccl",
    "open_links",
    "store_of",
    "subgroup",
]

"""Ways for ranks to exchange messages; all pass the checks of tests/multi_rank/conformance.py."""

from .base import Message, Transport
from .gloo import GlooTransport
from .hybrid import HybridTransport
from .links import LinkTransport
from .nccl import NcclTransport
from .nccl_calls import load_nccl
from .process_groups import store_of, subgroup
from .rendezvous import WAYS, open_links
from .threads import ThreadTransport, ThreadWorld

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

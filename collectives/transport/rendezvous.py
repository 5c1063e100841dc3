"""How ranks find out which of them share a host, and open links to those.

Every rank listens on a Unix socket in Linux's abstract namespace and tells all ranks its name and a
secret. Who can connect to it and knows the secret is in the same network namespace, so under the
same kernel; host names, which containers invent, play no part. The rings are memfds that travel
through the sockets: they have no name that could be guessed or left behind, they vanish with the
last process that maps them however it ends, and the size of /dev/shm, 64 MiB in many containers,
does not limit them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
from collections.abc import Callable

from .channel import INLINE_BYTES, RING_BYTES, SLOT_BYTES, SOCKET_BYTES, Link

Gather = Callable[[bytes], list[bytes]]

# Ranks whose links would not understand each other open none.
_FORMAT = [1, SLOT_BYTES, RING_BYTES, INLINE_BYTES]
_HELLO_BYTES = 256


def open_links(
    rank: int, gather: Gather, timeout: float, *, willing: bool = True
) -> dict[int, Link]:
    """Links to the ranks that share this rank's host and are willing too, by rank.

    A collective: `gather` returns every rank's bytes by rank, and every rank calls it three times
    whatever fails here. Both ranks of a pair get a link, or neither does: where the system refuses
    sockets, memory or descriptors, there is none. timeout: seconds that a peer's answer may take.
    """
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        listener = _listen(stack) if willing else None
        offer = None if listener is None else [_FORMAT, _name(listener), secret]
        offers = [json.loads(data) for data in gather(json.dumps(offer).encode())]
        calls: dict[int, tuple[socket.socket, mmap.mmap]] = {}
        for peer in range(rank if offer else 0):
            if offers[peer] and offers[peer][0] == _FORMAT:
                with contextlib.suppress(OSError):
                    calls[peer] = _call(rank, offers[peer][1], offers[peer][2], timeout)

        callers = [json.loads(data) for data in gather(json.dumps(list(calls)).encode())]
        expected = {peer for peer, called in enumerate(callers) if rank in called}
        links = {} if listener is None else _answer(listener, secret, expected)
        for peer, (sock, ring) in calls.items():
            try:
                links[peer] = Link(peer, sock, ring, _receive_ring(sock)[1])
            except OSError:
                sock.close()

        opened = [json.loads(data) for data in gather(json.dumps(list(links)).encode())]
        for peer in [peer for peer in links if rank not in opened[peer]]:
            links.pop(peer).close()
    return dict(sorted(links.items()))


def _listen(stack: contextlib.ExitStack) -> socket.socket | None:
    """A listening socket, open as long as the stack; None where the system has none to give."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(f"\0adasum-{secrets.token_hex(8)}")
        listener.listen(socket.SOMAXCONN)
    except OSError:
        return None
    listener.setblocking(False)
    return listener


def _name(listener: socket.socket) -> str:
    name: bytes = listener.getsockname()
    return name[1:].decode()


def _call(rank: int, name: str, secret: str, timeout: float) -> tuple[socket.socket, mmap.mmap]:
    """Connect to a rank and introduce this one; OSError where it is not on this host."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0{name}")
        return sock, _send_ring(sock, json.dumps([secret, rank]).encode())
    except OSError:
        sock.close()
        raise


def _answer(listener: socket.socket, secret: str, expected: set[int]) -> dict[int, Link]:
    """Links to the ranks that have called; all of `expected` have, and strangers may have."""
    links: dict[int, Link] = {}
    while expected - links.keys():
        try:
            sock, _ = listener.accept()
        except OSError:
            break
        # What a rank says is there already, so a silent stranger is not waited for.
        sock.setblocking(False)
        try:
            hello, incoming = _receive_ring(sock)
            said, peer = json.loads(hello)
            if not hmac.compare_digest(said, secret) or peer not in expected:
                raise ValueError("a stranger")
            links[peer] = Link(peer, sock, _send_ring(sock, b"welcome"), incoming)
        except (OSError, ValueError, TypeError):
            sock.close()
    return links


def _send_ring(sock: socket.socket, text: bytes) -> mmap.mmap:
    """Send `text` with a new ring, and return the ring; OSError where one cannot be had."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < SOCKET_BYTES:
        raise OSError("net.core.wmem_max is too small for a link")
    fd = os.memfd_create("adasum-ring")
    try:
        os.ftruncate(fd, RING_BYTES)
        ring = mmap.mmap(fd, RING_BYTES)
        socket.send_fds(sock, [text], [fd])
    finally:
        os.close(fd)
    return ring


def _receive_ring(sock: socket.socket) -> tuple[bytes, mmap.mmap]:
    """What the peer sent with its ring, and the ring."""
    text, fds, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 1)
    try:
        if len(fds) != 1 or os.fstat(fds[0]).st_size != RING_BYTES:
            raise OSError("the peer sent no ring")
        return text, mmap.mmap(fds[0], RING_BYTES)
    finally:
        for fd in fds:
            os.close(fd)

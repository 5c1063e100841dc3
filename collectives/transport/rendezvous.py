"""How ranks find out which of them share a host, and open links to those.

Every rank listens on a Unix socket in Linux's abstract namespace and tells all ranks its name and a
secret. Who can connect to it and knows the secret is in the same network namespace, so under the
same kernel; host names, which containers invent, play no part. The rings are memfds that travel
through the sockets: they have no name that could be guessed or left behind, they vanish with the
last process that maps them however it ends, and the size of /dev/shm, 64 MiB in many containers,
does not limit them.

Rank 0's answers carry one more memfd, the same for all: where all ranks have links to all, it is
the memory of their board.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from . import futex
from .board import WINDOW_BYTES, board_bytes
from .channel import INLINE_BYTES, RING_BYTES, SLOT_BYTES, SOCKET_BYTES, Link

Gather = Callable[[bytes], list[bytes]]

# Ranks whose links would not understand each other open none.
_FORMAT = [5, SLOT_BYTES, RING_BYTES, INLINE_BYTES, WINDOW_BYTES, futex.available]
_HELLO_BYTES = 256


class Met(NamedTuple):
    """links: to the ranks of this host, by rank. board: zeros that all ranks of the group share,
    where all have links to all and the system gave the memory; on every rank or on none."""

    links: dict[int, Link]
    board: memoryview | None


def open_links(
    rank: int, gather: Gather, timeout: float, wanted: Collection[int] | None = None
) -> Met:
    """Meet the ranks that share this rank's host and want this one too.

    A collective: `gather` returns every rank's bytes by rank, and every rank calls it three times
    whatever fails here. Both ranks of a pair get a link, or neither does: where the system refuses
    sockets, memory or descriptors, there is none. timeout: seconds that a peer's answer may take.
    wanted: the ranks to have links to, symmetrically; all unless given.
    """
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        listener = None if wanted is not None and not wanted else _listen(stack)
        offer = None if listener is None else [_FORMAT, _name(listener), secret]
        offers = [json.loads(data) for data in gather(json.dumps(offer).encode())]
        nbytes = board_bytes(len(offers))
        board = _new_board(stack, nbytes) if rank == 0 and listener else None
        calls: dict[int, tuple[socket.socket, mmap.mmap]] = {}
        for peer in range(rank if offer else 0):
            if offers[peer] and offers[peer][0] == _FORMAT and (wanted is None or peer in wanted):
                with contextlib.suppress(OSError):
                    calls[peer] = _call(rank, offers[peer][1], offers[peer][2], timeout)

        callers = [json.loads(data) for data in gather(json.dumps(list(calls)).encode())]
        expected = {peer for peer, called in enumerate(callers) if rank in called}
        links = {} if listener is None else _answer(listener, secret, expected, board)
        shared = None if board is None else board[1]
        for peer, (sock, ring) in calls.items():
            try:
                _, incoming, other = _receive_ring(sock, nbytes)
                links[peer] = Link(peer, sock, ring, incoming)
                shared = other or shared
            except OSError:
                sock.close()

        report = json.dumps([list(links), shared is not None]).encode()
        reports = [json.loads(data) for data in gather(report)]
        for peer in [peer for peer in links if rank not in reports[peer][0]]:
            links.pop(peer).close()
    if any(len(peers) < len(reports) - 1 or not has for peers, has in reports):
        shared = None
    return Met(dict(sorted(links.items())), None if shared is None else memoryview(shared))


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


def _new_board(stack: contextlib.ExitStack, nbytes: int) -> tuple[int, mmap.mmap] | None:
    """Memory for a board and its descriptor, open as long as the stack; None where refused."""
    try:
        fd = os.memfd_create("adasum-board")
        stack.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except OSError:
        return None


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


def _answer(
    listener: socket.socket, secret: str, expected: set[int], board: tuple[int, mmap.mmap] | None
) -> dict[int, Link]:
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
            hello, incoming, _ = _receive_ring(sock)
            said, peer = json.loads(hello)
            if not hmac.compare_digest(said, secret) or peer not in expected:
                raise ValueError("a stranger")
            shared = [] if board is None else [board[0]]
            links[peer] = Link(peer, sock, _send_ring(sock, b"welcome", shared), incoming)
        except (OSError, ValueError, TypeError):
            sock.close()
    return links


def _send_ring(sock: socket.socket, text: bytes, more: Sequence[int] = ()) -> mmap.mmap:
    """Send `text` with a new ring and the descriptors `more`, and return the ring.

    OSError where one cannot be had.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < SOCKET_BYTES:
        raise OSError("net.core.wmem_max is too small for a link")
    fd = os.memfd_create("adasum-ring")
    try:
        os.ftruncate(fd, RING_BYTES)
        ring = mmap.mmap(fd, RING_BYTES)
        socket.send_fds(sock, [text], [fd, *more])
    finally:
        os.close(fd)
    return ring


def _receive_ring(sock: socket.socket, board: int = 0) -> tuple[bytes, mmap.mmap, mmap.mmap | None]:
    """What the peer sent with its ring, the ring, and the board, of `board` bytes, if it did."""
    text, fds, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
    try:
        if not fds or os.fstat(fds[0]).st_size != RING_BYTES:
            raise OSError("the peer sent no ring")
        ring = mmap.mmap(fds[0], RING_BYTES)
        shared = None
        if len(fds) > 1 and os.fstat(fds[1]).st_size == board:
            # Without the room for a board there are still messages.
            with contextlib.suppress(OSError):
                shared = mmap.mmap(fds[1], board)
        return text, ring, shared
    finally:
        for fd in fds:
            os.close(fd)

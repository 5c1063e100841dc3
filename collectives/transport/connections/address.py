"""Find the address at which other hosts reach this rank."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

# Linux's ioctl for the IPv4 address of an interface, and the struct of its request and answer.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s4x4s16x")
_LONGEST_NAME = 15
# Linux's list of IPv6 addresses: each line has 32 digits, two numbers, the scope, a number and the
# interface's name. Addresses of these scopes (global, loopback) need no interface with them.
_INET6 = Path("/proc/net/if_inet6")
_SCOPES = ("00", "10")
# Any port will do, since nothing is sent: connecting a UDP socket only chooses the route.
_PORT = 9


def interface() -> str:
    """Return the network interface that the user has chosen for gloo, and so for us; "" if none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()


def of_interface(name: str) -> str:
    """Return an interface's IPv4 address, else an IPv6 one not link-local; OSError without one."""
    try:
        import fcntl
    except ImportError:
        raise OSError("only Unix tells an interface's address") from None
    if len(name.encode()) > _LONGEST_NAME:
        raise OSError(f"no interface has a name as long as {name}")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, _IFREQ.pack(name.encode(), bytes(4)))
        return socket.inet_ntoa(_IFREQ.unpack(answer)[1])
    except OSError:
        found = _inet6(name)
        if found is None:
            raise
        return found


def _inet6(name: str) -> str | None:
    """Return an IPv6 address of the interface that needs no scope; None if Linux lists none."""
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:
        return None
    for digits, _, _, scope, _, owner in map(str.split, lines):
        if owner == name and scope in _SCOPES:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def source_of(host: str) -> str:
    """Return the address from which this machine sends to a host; OSError without a route."""
    error = OSError(f"{host} has no address")
    for family, kind, _, _, target in socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as sock:
                sock.connect(target)
                address: str = sock.getsockname()[0]
                return address
        except OSError as refused:
            error = refused
    raise error


def reaches_others(address: str) -> bool:
    """Whether other machines can use the address for this one: not loopback, not link-local."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local)

"""By which address other hosts reach this rank."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

# Linux's request for the IPv4 address of an interface, and where it is in the answer.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s4x4s16x")
_LONGEST_NAME = 15
# Linux's IPv6 addresses, one a line: 32 digits, three numbers, the scope and the interface's name
# among them. Of these scopes are those that the address alone leads to.
_INET6 = Path("/proc/net/if_inet6")
_SCOPES = ("00", "10")
# Any port: nothing is sent there.
_PORT = 9


def interface() -> str:
    """The network interface that the user has chosen for gloo, which ours follows; "" for none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()


def of_interface(name: str) -> str:
    """The interface's IPv4 address, else an IPv6 one that is not link-local.

    OSError where it has none or the system does not tell.
    """
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
    """An interface's IPv6 address that needs no scope, where Linux tells one."""
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:
        return None
    for digits, _, _, scope, _, owner in map(str.split, lines):
        if owner == name and scope in _SCOPES:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def source_of(host: str) -> str:
    """The address that this machine sends from to a host; OSError where no way leads there."""
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
    """Whether it means the same machine to another one: not loopback and link-local ones."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local)

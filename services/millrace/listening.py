"""Sockets of servers, before they listen."""

from __future__ import annotations

import socket
from typing import Final

#: Every address of this machine.
EVERYWHERE: Final = "::"


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a bound TCP socket. EVERYWHERE includes the addresses of IPv4, and is theirs alone
    where there is no IPv6. `shared`: other processes may bind the port, too (SO_REUSEPORT).

    Raises OSError.
    """
    everywhere = host == EVERYWHERE
    if everywhere and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if everywhere and family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound

"""Network addresses as text."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Returns an address of the form `host:port`: of a host, with this `port`."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        is_host = ":" not in address
    else:
        is_host = True
    return host_port(address, port) if is_host else address

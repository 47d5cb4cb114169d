"""Network addresses as text."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

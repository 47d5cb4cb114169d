"""Sockets of servers. None on every address of the machine listens here."""

from __future__ import annotations

import socket

import pytest

from millrace.listening import EVERYWHERE, bound_socket


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_everywhere_has_the_addresses_of_both_families() -> None:
    with bound_socket(EVERYWHERE, 0) as bound:
        assert bound.getsockname()[0] == "::"
        assert not bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def test_everywhere_is_every_address_of_ipv4_where_there_is_no_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bound_socket(EVERYWHERE, 0) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"


def test_a_port_is_shared_among_those_that_want_to() -> None:
    with bound_socket("127.0.0.1", 0, shared=True) as first:
        first.listen()
        port = first.getsockname()[1]
        bound_socket("127.0.0.1", port, shared=True).close()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", port)

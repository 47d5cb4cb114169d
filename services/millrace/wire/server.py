"""gRPC servers: bounded messages, keepalive, the standard health service, clear bind errors."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined] # stubs lack it

from millrace.core.errors import MillraceError
from millrace.wire.address import host_port
from millrace.wire.options import MAX_MESSAGE_BYTES, server_options
from millrace.wire.tls import process_tls


class BindError(MillraceError):
    """A server can't listen on its address. The error names host and port."""


class Health:
    """The health of a server's services over grpc.health.v1.

    The server as a whole (the empty name) is serving while it answers: a liveness probe asks for
    it. The named services follow `set_serving`, and are unknown before its first call: a
    readiness probe asks for a named service.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.servicer = health_aio.HealthServicer()

    async def set_serving(self, serving: bool) -> None:
        """Sets the status of the named services; watchers get it at once."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._names:
            await self.servicer.set(name, status)


def create_server(*, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    """Returns a grpc.aio server whose peers may ping as often as `open_channel` does."""
    return grpc.aio.server(options=server_options(max_message_bytes))


def add_health(server: grpc.aio.Server, names: Sequence[str]) -> Health:
    """Adds grpc.health.v1 for the full service `names`, such as "millrace.v1.Decode"."""
    health = Health(names)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    return health


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listens on `host:port` before `server.start()`; returns the real port (`port` 0: a free one).

    If the process uses TLS, clients must show a certificate that its CA has signed. Raises
    BindError, which names host and port, if the address can't be bound.
    """
    address = host_port(host, port)
    tls = process_tls()
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise BindError(f"can't listen on {address}: {error}") from error
    if bound == 0:
        raise BindError(f"can't listen on {address}")
    return bound

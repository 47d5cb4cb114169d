"""gRPC channels to peers: options as in `create_server`, the process's TLS, fast reconnects."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from millrace.wire.options import MAX_MESSAGE_BYTES, channel_options
from millrace.wire.tls import SERVER_NAME, process_tls

_NAMED: Final[list[tuple[str, str]]] = [("grpc.ssl_target_name_override", SERVER_NAME)]


def open_channel(
    address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, alone: bool = False
) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port) at once; the first call connects.

    A channel `alone` tries at once, also after another channel to the address has just failed.

    A lost connection is tried again after 100 ms, then after growing delays up to 2 s, with the
    certificates that were read at the opening: a long-lived client opens a new channel after a
    loss (or uses `Channels`).
    """
    options = channel_options(max_message_bytes)
    if alone:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if (tls := process_tls()) is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, *_NAMED]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=named)


def open_blocking_channel(address: str, *, max_message_bytes: int) -> grpc.Channel:
    """Returns a channel for threads, as `open_channel` does for an event loop."""
    options = channel_options(max_message_bytes)
    if (tls := process_tls()) is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials(), options=[*options, *_NAMED])


class Channels:
    """Keeps one channel per peer, opened at its first use and again after renewed certificates."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[grpc.aio.Channel, grpc.ChannelCredentials | None]] = {}
        #: Channels with the previous certificates: calls may be in flight on them. They are closed
        #: when the certificates are renewed again.
        self._earlier: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to host:port."""
        tls = process_tls()
        credentials = None if tls is None else tls.channel_credentials()
        if address in self._open:
            channel, opened_with = self._open[address]
            if opened_with is credentials:
                return channel
            if address in self._earlier:
                self._end(self._earlier[address])
            self._earlier[address] = channel
        channel = open_channel(address)
        self._open[address] = (channel, credentials)
        return channel

    async def close(self) -> None:
        for channel in [*self._earlier.values(), *(channel for channel, _ in self._open.values())]:
            self._end(channel)
        self._earlier.clear()
        self._open.clear()
        await asyncio.gather(*self._closing)

    def _end(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(grace=None))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

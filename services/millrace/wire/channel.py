"""gRPC channels to peers: the options of `create_server`, and fast reconnects."""

from __future__ import annotations

import grpc

from millrace.wire.options import MAX_MESSAGE_BYTES, channel_options


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `address` (host:port). Returns at once; the first call connects.

    A lost connection is tried again after 100 ms, then ever later up to 2 s.
    """
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))

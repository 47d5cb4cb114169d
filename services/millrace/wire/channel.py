"""gRPC channels to peers: the options of `create_server`, and fast reconnects."""

from __future__ import annotations

import grpc

from millrace.wire.options import MAX_MESSAGE_BYTES, common_options


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `address` (host:port). Returns at once; the first call connects.

    A lost connection is tried again after 100 ms, then ever later up to 2 s.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            *common_options(max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Despite its name the time one connection attempt may take (gRPC core, subchannel.cc).
            ("grpc.min_reconnect_backoff_ms", 2000),
            # A pod that restarts has a new address behind its old name.
            ("grpc.dns_min_time_between_resolutions_ms", 1000),
            # Peers are reached directly, whatever http_proxy says.
            ("grpc.enable_http_proxy", 0),
        ],
    )

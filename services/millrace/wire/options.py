"""gRPC options of both ends of a connection: message limits, keepalive, reconnects.

A peer that stops answering (its machine is gone, its process is stopped) is found within
`KEEPALIVE_INTERVAL_S + KEEPALIVE_TIMEOUT_S`; a peer whose process ended is found at once by the
closed socket. The names of the options are in grpc/impl/channel_arg_names.h of gRPC core.
"""

from __future__ import annotations

#: Largest message in both directions: one message carries a long prompt's log probabilities.
MAX_MESSAGE_BYTES = 64 << 20

#: Between the stages of an instance: the queries of a long chunk's layer, and more.
MAX_STAGE_MESSAGE_BYTES = 1 << 30

KEEPALIVE_INTERVAL_S = 2.0
KEEPALIVE_TIMEOUT_S = 4.0  # a busy machine may be slow to answer

Options = list[tuple[str, int]]


def _common(max_message_bytes: int) -> Options:
    """Returns the options of servers and channels. `max_message_bytes` limits both directions."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # gRPC core waits for its ping timeout (a minute) if that timeout is longer.
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # Streams may be silent for minutes: pings continue without calls and without data.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> Options:
    return [
        *_common(max_message_bytes),
        # Half the peers' interval, so that an early ping is not counted as a violation.
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_INTERVAL_S * 500)),
        ("grpc.http2.max_ping_strikes", 0),
        # A second server on the same port must fail to bind, not share its connections.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_common(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Despite its name, the timeout of one connection attempt (gRPC core, subchannel.cc).
        ("grpc.min_reconnect_backoff_ms", 2000),
        # A pod that restarts keeps its name and has a new address.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # Peers are reached directly, even if http_proxy is set.
        ("grpc.enable_http_proxy", 0),
    ]

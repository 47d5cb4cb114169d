"""gRPC options that both ends of a connection share: message bounds and keepalive.

A peer that stops answering (its machine gone, its process stopped) is noticed within
`KEEPALIVE_INTERVAL_S + KEEPALIVE_TIMEOUT_S`; a peer whose process ended is noticed at once by the
closed socket. Names of options: grpc/impl/channel_arg_names.h of gRPC core.
"""

from __future__ import annotations

#: Largest message either way: a long prompt's log probabilities travel in one.
MAX_MESSAGE_BYTES = 64 << 20

KEEPALIVE_INTERVAL_S = 2.0
KEEPALIVE_TIMEOUT_S = 2.0

Options = list[tuple[str, int]]


def common_options(max_message_bytes: int) -> Options:
    """Options of servers and channels alike. `max_message_bytes` bounds both directions."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # Streams may be silent for minutes: pings go on without calls and without data.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]

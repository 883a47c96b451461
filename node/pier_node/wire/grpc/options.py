"""What both ends of the gRPC carrier agree on, and the settings of gRPC, each with its reason.

https://github.com/grpc/grpc/blob/master/include/grpc/impl/channel_arg_names.h lists the settings.
"""

from __future__ import annotations

import json

from pier_node.wire.carrier import DESCRIBE, KEEPALIVE, MANIFEST_BYTES, REPLY_BYTES

SERVICE = "pier.v1.Peer"
END = b""
"""Closes a pushed stream. The receiver's library cannot tell a stream that was cut off from a complete one."""

CALLS_PER_CONNECTION = 64

_BOTH: dict[str, int] = {
    # A NAT or firewall silently forgets an idle connection after about a minute.
    "grpc.keepalive_time_ms": int(1000 * KEEPALIVE),
    "grpc.keepalive_timeout_ms": int(1000 * KEEPALIVE),
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}
_SERVER: dict[str, int] = {
    "grpc.so_reuseport": 0,  # a port in use is an error, not a second server that takes half of the calls
    "grpc.max_concurrent_streams": CALLS_PER_CONNECTION,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,  # otherwise the pings of idle peers are "too many"
    "grpc.http2.max_ping_strikes": 0,
}
_CLIENT: dict[str, int | str] = {
    "grpc.max_receive_message_length": MANIFEST_BYTES,
    "grpc.service_config": json.dumps(
        {
            "methodConfig": [
                {"name": [{}], "maxResponseMessageBytes": REPLY_BYTES},
                {
                    "name": [{"service": SERVICE, "method": DESCRIBE.name}],
                    "maxResponseMessageBytes": MANIFEST_BYTES,
                },
            ]
        }
    ),
    "grpc.enable_retries": 0,  # only code that knows the question can decide whether to ask again
    "grpc.enable_http_proxy": 0,  # a proxy set for the web cannot reach peers
    "grpc.use_local_subchannel_pool": 1,  # each channel has its own connection
    # A peer that comes back is found within a second; a connection attempt may take five seconds.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.min_reconnect_backoff_ms": 5_000,
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
}

NO_PROBES = ("grpc.http2.bdp_probe", 0)
"""Turns off gRPC's bandwidth probes: they serve large messages, and would add two pings to each small one."""
CHANNEL_OPTIONS = [*_BOTH.items(), *_CLIENT.items()]
"""Options of a channel to a peer."""


def server_options(most: int) -> list[tuple[str, int]]:
    """Options of a server that takes messages of `most` bytes."""
    return [*_BOTH.items(), *_SERVER.items(), ("grpc.max_receive_message_length", most)]

from __future__ import annotations

import json

from pier_node.wire.carrier import CHUNK_BYTES, DESCRIBE, MANIFEST_BYTES, MESSAGE_BYTES
from pier_node.wire.grpc.options import CHANNEL_OPTIONS, SERVICE, server_options

SERVER, CHANNEL = dict(server_options(MESSAGE_BYTES)), dict(CHANNEL_OPTIONS)


def test_idle_connections_are_kept_alive_from_both_ends() -> None:
    for options in (SERVER, CHANNEL):
        assert 20_000 <= int(options["grpc.keepalive_time_ms"]) <= 30_000
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0


def test_no_peer_sends_too_many_pings() -> None:
    assert SERVER["grpc.http2.max_ping_strikes"] == 0
    assert SERVER["grpc.http2.min_ping_interval_without_data_ms"] < CHANNEL["grpc.keepalive_time_ms"]  # type: ignore[operator]


def test_messages_are_bounded() -> None:
    assert CHUNK_BYTES < MESSAGE_BYTES < 2 * CHUNK_BYTES
    assert SERVER["grpc.max_receive_message_length"] == MESSAGE_BYTES
    assert CHANNEL["grpc.max_receive_message_length"] == MANIFEST_BYTES
    limits = {
        entry["name"][0].get("method"): (entry["name"][0].get("service"), entry["maxResponseMessageBytes"])
        for entry in json.loads(str(CHANNEL["grpc.service_config"]))["methodConfig"]
    }
    assert limits[DESCRIBE.name] == (SERVICE, MANIFEST_BYTES)
    assert limits[None] == (None, 2 * CHUNK_BYTES)


def test_a_second_server_on_a_port_is_an_error() -> None:
    assert SERVER["grpc.so_reuseport"] == 0

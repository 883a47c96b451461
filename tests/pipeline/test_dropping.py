from __future__ import annotations

import logging

import pytest
from wire.memory_carrier import MemoryNet

from pier_node.pipeline.joint import drop
from pier_node.wire.carrier import DROP
from pier_proto.v1.peer_pb2 import Ack, Dropped


async def test_all_are_told_but_those_who_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    net, told = MemoryNet(), dict[str, Dropped]()
    for node in ("beta", "gamma"):

        async def hear(peer: str, notice: Dropped, node: str = node) -> Ack:
            told[node] = notice
            return Ack()

        net.join(node).serve(DROP, hear)
    caplog.set_level(logging.INFO)
    await drop(net.join("alpha"), ("beta", "lost", "gamma"), b"7", "lost", "x" * 5000, 1.0)
    assert told == dict.fromkeys(("beta", "gamma"), Dropped(attempt=b"7", suspect="lost", reason="x" * 1000))
    assert "could not tell lost" in caplog.text

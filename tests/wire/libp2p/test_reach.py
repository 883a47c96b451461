"""What a site that begins to listen makes of the answers of those that it asks to call back."""

from __future__ import annotations

from typing import Any

import pytest

from pier_node.wire.libp2p.relay import find_unreached
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site

REACHED = ProbeReply(reached=True)
LOST = ProbeReply(detail="connection refused")
DECLINED = ProbeReply(declined=True, detail="it does not try that")


class Asker:
    """Has its answers from a list."""

    node = "a" * 16

    def __init__(self, *answers: ProbeReply) -> None:
        self._answers = {f"{number:016x}": answer for number, answer in enumerate(answers)}

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        return HelloReply(site=Site(node=f"{int(address):016x}"))

    def introduce(self, node: str, address: str) -> None:
        pass

    async def call(self, peer: str, method: object, request: ProbeRequest, timeout: float) -> ProbeReply:
        return self._answers[peer]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((REACHED, REACHED), ""),
        ((REACHED, LOST), "connection refused"),
        ((DECLINED, LOST), "connection refused"),
        ((DECLINED, REACHED), ""),
        ((DECLINED, DECLINED), "it does not try that"),
        ((), ""),
    ],
)
async def test_who_does_not_try_counts_when_nobody_does(answers: tuple[ProbeReply, ...], reason: str) -> None:
    asker: Any = Asker(*answers)
    found, _ = await find_unreached(asker, "10.0.0.1:7700", [str(number) for number in range(len(answers))], bytes(32))
    assert found == reason

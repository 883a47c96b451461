from __future__ import annotations

import pytest
from outer.cases import outer_state
from training_cases import Roster

from pier.v1.peer_pb2 import Pulse
from pier_node.agreement import assert_agreement
from pier_node.errors import PierError

STATE = outer_state(["a", "me", "z"], round=3)
OTHER = b"?" * 32


def check(*nodes: str, round: int = 3, digest: bytes = OTHER) -> None:
    roster: object = Roster(pulses={node: Pulse(round=round, digest=digest) for node in nodes})
    assert_agreement(roster, STATE)  # type: ignore[arg-type]


def test_equal_bits_and_other_rounds_are_agreement(caplog: pytest.LogCaptureFixture) -> None:
    check("a", "z", digest=STATE.digest)
    check("a", "z", round=2)
    check("a", "z", round=4)
    assert not caplog.records


def test_who_is_alone_with_its_bits_stops() -> None:
    with pytest.raises(PierError, match="round 3: a says that it holds other bits") as told:
        check("a", "z")
    assert STATE.digest.hex()[:12] in str(told.value)
    assert "empty data directory" in told.value.remedy


@pytest.mark.parametrize("nodes", ["z", "bcdefg"])
def test_one_liar_or_many_strangers_stop_nobody(nodes: str, caplog: pytest.LogCaptureFixture) -> None:
    check(*nodes)
    assert f"round 3: {nodes[0]} says that it holds other bits" in caplog.text

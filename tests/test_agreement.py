from __future__ import annotations

import pytest
from outer.cases import outer_state
from training_cases import Roster

from pier.v1.peer_pb2 import Pulse
from pier_node.agreement import assert_agreement
from pier_node.errors import PierError

STATE = outer_state(["me"], round=3)


def check(pulse: Pulse) -> None:
    roster: object = Roster(pulses={"other": pulse})
    assert_agreement(roster, STATE)  # type: ignore[arg-type]


def test_equal_bits_and_other_rounds_are_agreement() -> None:
    check(Pulse(round=3, digest=STATE.digest))
    check(Pulse(round=2, digest=b"?" * 32))
    check(Pulse(round=4, digest=b"?" * 32))


def test_other_bits_after_the_same_round_are_told() -> None:
    with pytest.raises(PierError, match="round 3: other holds other bits") as told:
        check(Pulse(round=3, digest=b"?" * 32))
    assert STATE.digest.hex()[:12] in str(told.value)
    assert "empty data directory" in told.value.remedy

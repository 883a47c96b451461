from __future__ import annotations

import pytest
from rounds.cases import outer_state
from simulation.training_cases import Roster

from pier_node.site.training import report_other_bits
from pier_proto.v1.peer_pb2 import Pulse

STATE = outer_state(["a", "me", "z"], round=3)
OTHER = b"?" * 32


def report(*nodes: str, round: int = 3, digest: bytes = OTHER) -> None:
    roster: object = Roster(pulses={node: Pulse(round=round, digest=digest) for node in nodes})
    report_other_bits(roster, STATE)  # type: ignore[arg-type]


def test_equal_bits_and_other_rounds_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    report("a", "z", digest=STATE.digest)
    report("a", "z", round=2)
    report("a", "z", round=4)
    assert not caplog.records


@pytest.mark.parametrize("nodes", ["z", "az", "bcdefg"])
def test_what_others_say_of_their_bits_is_an_error_once_each_and_stops_nobody(
    nodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when most of the round's members say so: a liar could stop the other site of a run of two."""
    report(*nodes)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * len(nodes)
    for node, record in zip(nodes, caplog.records, strict=True):
        assert f"round 3: {node} says that its state differs" in record.getMessage()
        assert STATE.digest.hex()[:12] in record.getMessage()

"""The line for each committed round says how far the run is, how it goes here, and how long it will take."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from rounds.cases import outer_state

from pier_node.base.units import rate
from pier_node.config.run import RunConfig
from pier_node.outer.times import Times
from pier_node.rounds.progress import Progress
from pier_node.site.round_log import RoundLog, prediction, tell_start
from pier_node.wire.probe import LinkSpeed
from pier_proto.v1.peer_pb2 import ProbeReply, ProbeRequest, Pulse


def test_a_round_of_two(caplog: pytest.LogCaptureFixture) -> None:
    progress, carrier, now = Progress(), Mock(), [0.0]
    carrier.bytes_sent.return_value = 0
    told = RoundLog(5000, progress, carrier, clock=lambda: now[0])

    def committed(round: int, **changed: Any) -> str:
        vars(progress).update(changed)
        with caplog.at_level(logging.INFO):
            told.committed(outer_state(["a", "b"], round=round))
        return caplog.messages[-1]

    assert committed(1, inner_step=50) == "round 1 committed by 2: step 50 of 5,000", "nothing else is known yet"
    carrier.bytes_sent.return_value = 12_300_000
    now[0] = 10.0
    more = {"loss": 3.4121, "validation_loss": 3.5, "validated_round": 2, "tokens_per_second": 12_345.6}
    said = committed(2, inner_step=100, times=Times(exchange=1.4), **more)
    assert said == (
        "round 2 committed by 2: step 100 of 5,000, loss 3.4121, validation loss 3.5000, 12,346 tokens/s, "
        "1.4 s of exchange, 12.3 MB sent, 16.3 min left"
    )
    now[0] = 20.0
    assert committed(3, inner_step=5000).endswith("12,346 tokens/s"), "validated before, nothing sent, nothing left"


def test_who_was_late_is_named(caplog: pytest.LogCaptureFixture) -> None:
    carrier = Mock()
    carrier.bytes_sent.return_value = 0
    pulses = {"b": Pulse(training_for=7), "c": Pulse(training_for=7), "d": Pulse(training_for=8), "new": Pulse()}
    told = RoundLog(5000, Progress(inner_step=50), carrier, lambda: pulses)
    with caplog.at_level(logging.INFO):
        told.committed(outer_state(["a", "b"], round=7))
    assert caplog.messages == ["round 7 committed by 2: step 50 of 5,000, late: c"]


def test_what_the_model_writes_is_told_once_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    progress, carrier = Progress(metrics={"sample": "def main():\n\treturn  1\n"}), Mock()
    carrier.bytes_sent.return_value = 0
    told = RoundLog(5000, progress, carrier)
    with caplog.at_level(logging.INFO):
        told.committed(outer_state(["a"], round=1))
        told.committed(outer_state(["a"], round=2))
    assert [line for line in caplog.messages if "committed" not in line] == ["the model writes: def main(): return 1"]


async def test_a_link_is_measured_at_the_start_and_the_coordinator_told(caplog: pytest.LogCaptureFixture) -> None:
    async def call(_node: str, _method: str, request: ProbeRequest, _timeout: float) -> ProbeReply:
        return ProbeReply(padding=bytes(request.reply_size))

    carrier, roster, program, known = Mock(node="a", call=call), Mock(), {"step_tokens": 9, "tensors": ["w 2x3"]}, []
    roster.changed.until = AsyncMock(side_effect=lambda met: met())
    roster.participants.return_value = {"a": Pulse(), "b": Pulse()}
    config = RunConfig.model_validate({"run": {"sites": 2}, "program": program})
    with caplog.at_level(logging.INFO):
        await tell_start(config, Mock(), Progress(), roster, carrier, lambda *link: known.append(link))
    ((peer, bandwidth),) = known
    assert peer == "b"
    assert "link to b: " in caplog.text
    assert f"{rate(bandwidth)} there" in caplog.text


def test_what_a_link_predicts_is_told() -> None:
    config = RunConfig.model_validate({"run": {"sites": 2}, "model": {"preset": "llama-1m"}})
    link = LinkSpeed(round_trip=0.012, clock_ahead=0.0, up=12.5e6, down=25e6)
    told = prediction(config, 0.0, "beta", link)
    assert told == (
        "link to beta: 12 ms round trip, 100 Mbit/s there, 200 Mbit/s back; an exchange of 2 sites sends 4.15 MB, "
        "which takes 356 ms on it"
    )
    assert prediction(config, 7700.0, "beta", link) == (
        f"{told}; the inner steps take 6.65 s: this site trains 95 % of the time"
    )


def test_what_a_program_says_that_its_model_writes_is_made_printable() -> None:
    """Coordinators refuse what does not print."""
    progress = Progress(metrics={"sample": "a\u00a0b\rc\x1b[0m\nd\te"})
    assert progress.sample == "a\ufffdb\ufffdc\ufffd[0m\nd\te"

"""What a site tells of itself, with the times of its rounds."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from rounds.cases import outer_state

from pier_coordinator.service.bounds import RULES
from pier_node.outer.times import Times
from pier_node.rounds.progress import Progress
from pier_node.site.coordinator.records import BATCH, DEVICE, ENOUGH, LINE, Noting, Recorder, Reports, memory_held
from pier_proto.v1.coordinator_pb2 import Record
from pier_proto.v1.peer_pb2 import Phase

NODE = "0a" * 8


@dataclass
class Played:
    """A carrier and a roster."""

    sent: int = 0
    contacts: dict[str, Any] = field(default_factory=dict)

    def bytes_sent(self) -> int:
        return self.sent

    def bytes_sent_to(self, peer: str) -> int:
        return self.sent


@dataclass
class Contact:
    round_trip: float


def recorder(progress: Progress, played: Played) -> tuple[Recorder, Reports]:
    reports = Reports()
    around: Any = played
    return Recorder(reports, progress, around, around), reports


def told(reports: Reports) -> list[Record]:
    records = list(reports.request(b"").records)
    reports.stored(1 << 30)
    return records


def test_a_round_says_where_its_time_went() -> None:
    progress, played = Progress(inner_step=350, compute=10.0, waited=5.0), Played(contacts={"other": Contact(0.04)})
    writer, reports = recorder(progress, played)
    progress.compute, progress.waited, progress.times = 14.0, 8.0, Times(waiting=1.0, exchange=2.0)
    progress.validation_loss, progress.validated_round, progress.loss, played.sent = 3.5, 7, 3.0, 4 * ENOUGH
    writer.round(outer_state(["me", "other"], round=7))()
    one, link = told(reports)
    assert (one.round.round, list(one.round.members), one.round.inner_step) == (7, ["me", "other"], 350)
    assert (one.round.compute, one.round.waiting, one.round.exchange, one.round.retry) == (4.0, 1.0, 2.0, 0.0)
    assert (one.round.loss, one.round.validation_loss) == (3.0, 3.5)
    assert (link.link.peer, link.link.round_trip, link.link.bandwidth) == ("other", 0.04, 2.0 * ENOUGH)


def test_a_few_bytes_do_not_say_how_fast_a_line_is() -> None:
    progress, played = Progress(times=Times(exchange=2.0)), Played(contacts={"other": Contact(0.04)})
    writer, reports = recorder(progress, played)
    for played.sent in (ENOUGH - 1, 2 * ENOUGH - 1, 3 * ENOUGH - 2):
        writer.round(outer_state(["me", "other"], round=1))()
    assert [it.link.bandwidth for it in told(reports) if it.HasField("link")] == [0.0, ENOUGH / 2, 0.0]


def test_a_line_that_was_measured_before_any_round_is_told() -> None:
    played = Played(contacts={"other": Contact(0.04)})
    writer, reports = recorder(Progress(times=Times(exchange=0.5)), played)
    played.sent = 5 * ENOUGH
    writer.link("other", 12.5e6)
    writer.link("gone meanwhile", 12.5e6)
    writer.round(outer_state(["me", "other"], round=1))()
    links = [it.link for it in told(reports) if it.HasField("link")]
    assert [(it.peer, it.round_trip, it.bandwidth) for it in links] == [("other", 0.04, 12.5e6), ("other", 0.04, 0.0)]


def test_lines_that_are_known_are_told_as_they_are() -> None:
    progress, played = Progress(times=Times(exchange=2.0)), Played(4 * ENOUGH, {"b": Contact(0.04), "c": Contact(0.02)})
    writer, reports = recorder(progress, played)
    writer.round(outer_state(["me", "b", "c"], round=1), {"b": 7.0})()
    links = {it.link.peer: it.link.bandwidth for it in told(reports) if it.HasField("link")}
    assert links == {"b": 7.0, "c": 0.0}


def test_what_overlap_hides_is_not_shown_as_waiting() -> None:
    progress = Progress()
    writer, reports = recorder(progress, Played())
    progress.compute, progress.waited, progress.times = 4.0, 1.0, Times(waiting=2.0, exchange=2.0)
    writer.round(outer_state(["me"], round=1))()
    (one,) = told(reports)
    assert (one.round.compute, one.round.waiting, one.round.exchange) == (4.0, 0.5, 0.5)


def test_a_site_that_does_not_train_has_no_speed() -> None:
    progress = Progress(phase=Phase.PHASE_TRAINING, tokens_per_second=800.0, inner_step=7)
    writer, reports = recorder(progress, Played())
    for progress.phase in (Phase.PHASE_TRAINING, Phase.PHASE_WAITING, Phase.PHASE_PAUSED, Phase.PHASE_DONE):
        writer.sample(memory=1000)
    assert [it.sample.tokens_per_second for it in told(reports)] == [800.0, 800.0, 0.0, 0.0]


def test_the_next_round_counts_from_the_last_one() -> None:
    progress = Progress()
    writer, reports = recorder(progress, Played())
    for compute in (2.0, 5.0):
        progress.compute = compute
        writer.round(outer_state(["me"], round=1))()
    assert [it.round.compute for it in told(reports)] == [2.0, 3.0]


def test_what_is_not_known_is_nan() -> None:
    progress = Progress(loss=math.inf, validation_loss=2.0, validated_round=3)
    writer, reports = recorder(progress, Played())
    writer.round(outer_state(["me"], round=4))()
    writer.sample(memory=1000)
    progress.device.words, progress.device.full_speed = "8 x H100\n" + "x" * DEVICE, 2000.0
    progress.tokens_per_second, progress.device.peak_bytes = 800.0, 7
    writer.sample(memory=1000, cpu=0.25)
    round_record, sample, known = told(reports)
    assert (sample.sample.device, sample.sample.mfu, sample.sample.cpu) == ("", 0.0, 0.0)
    assert known.sample.device.startswith("8 x H100xxx")
    assert len(known.sample.device) < DEVICE
    assert (known.sample.device_memory, known.sample.mfu, known.sample.cpu) == (7, 0.4, 0.25)
    assert math.isnan(round_record.round.loss)
    assert math.isnan(round_record.round.validation_loss)
    assert math.isnan(sample.sample.utilisation)
    assert sample.sample.memory == 1000


def test_an_infinite_loss_is_one_that_is_not_known() -> None:
    progress = Progress(loss=-math.inf, validation_loss=math.inf, validated_round=4)
    writer, reports = recorder(progress, Played())
    writer.round(outer_state([NODE], round=4))()
    (one,) = told(reports)
    RULES.check(one)
    assert math.isnan(one.round.validation_loss)


def test_lines_of_the_log_become_notes_and_those_that_are_no_warnings_wait_for_nobody() -> None:
    writer, reports = recorder(Progress(), Played())
    log = logging.Logger("test")
    log.addHandler(Noting(writer))
    for number in range(BATCH + 10):
        log.info("round %d", number)
    log.warning("lab-b %s", "x" * LINE)
    assert len(reports) == BATCH + 1
    reports.stored(BATCH)
    (note,) = told(reports)
    assert (note.note.level, len(note.note.text)) == (logging.WARNING, LINE)
    assert note.note.text.startswith("lab-b xxx")


@pytest.mark.parametrize("odd", ["502\r\n", "\x1b[31mfailed", "no\u202fbreak", "caf\udce9.txt"])
def test_whatever_letters_a_line_of_the_log_has_the_coordinator_takes_its_note(odd: str) -> None:
    writer, reports = recorder(Progress(), Played())
    log = logging.Logger("test")
    log.addHandler(Noting(writer))
    log.warning("mlflow gets no more metrics of this site:\n\t%s", odd)
    (note,) = told(reports)
    RULES.check(note)
    assert note.note.text.startswith("mlflow gets no more metrics of this site:\n\t")


def test_memory_is_that_of_this_process_at_least() -> None:
    assert memory_held() > 10e6


def test_a_sample_of_text_is_told_once() -> None:
    progress, played = Progress(metrics={"sample": "once upon", "phase": "warm"}), Played()
    writer, reports = recorder(progress, played)
    for number in (1, 2):
        writer.round(outer_state(["me"], round=number))()
    progress.metrics = {"sample": 0.5}
    writer.round(outer_state(["me"], round=3))()
    assert [it.round.sample for it in told(reports)] == ["once upon", "", ""]

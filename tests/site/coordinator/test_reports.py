"""What is not stored yet is kept, in order, up to a bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.service.bounds import parse
from pier_node.site.coordinator.records import BATCH, LINE, Reports
from pier_proto.v1.coordinator_pb2 import Note, Record, ReportRequest


def record(text: str) -> Record:
    return Record(note=Note(text=text))


def texts(request: ReportRequest) -> list[str]:
    return [it.note.text for it in request.records]


class Disk:
    """Stores records as a coordinator does: by their numbers, whatever was lost on the way."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def take(self, request: ReportRequest) -> int:
        for number, text in enumerate(texts(request), request.first):
            assert self.held.setdefault(number, text) == text
        return request.first + len(request.records)


@given(st.lists(st.sampled_from(["add", "lost request", "lost answer", "report"]), max_size=60))
def test_every_record_is_stored_once_whatever_gets_lost(acts: list[str]) -> None:
    reports, disk, told = Reports(), Disk(), 0
    for act in [*acts, "report"]:
        if act == "add":
            reports.add(record(str(told)))
            told += 1
        elif act != "lost request":
            stored = disk.take(reports.request(b"lease"))
            if act == "report":
                reports.stored(stored)
    assert disk.held == {number: str(number) for number in range(told)}
    assert len(reports) == 0


def test_the_oldest_go_first_and_are_counted() -> None:
    reports = Reports(keep=3)
    for number in range(5):
        reports.add(record(str(number)))
    request = reports.request(b"lease")
    assert (request.first, texts(request), request.dropped) == (2, ["2", "3", "4"], 2)


def test_a_report_has_a_bounded_number_of_records() -> None:
    reports = Reports()
    for number in range(BATCH + 5):
        reports.add(record(str(number)))
    first = reports.request(b"lease")
    assert len(first.records) == BATCH
    reports.stored(first.first + BATCH)
    rest = reports.request(b"lease")
    assert (rest.first, len(rest.records), rest.stream) == (BATCH, 5, first.stream)


def test_a_report_of_long_notes_is_no_longer_than_the_coordinator_takes() -> None:
    reports, written = Reports(), ["é" * LINE] * BATCH
    for text in written:
        reports.add(record(text))
    read: list[str] = []
    while len(reports):
        request = reports.request(b"lease")
        read += texts(parse(ReportRequest, request.SerializeToString()))
        reports.stored(request.first + len(request.records))
    assert read == written


def test_what_was_dropped_meanwhile_is_not_taken_for_stored() -> None:
    reports = Reports(keep=2)
    reports.add(record("0"))
    asked = reports.request(b"lease")
    for number in range(1, 4):
        reports.add(record(str(number)))
    reports.stored(asked.first + 1)
    assert texts(reports.request(b"lease")) == ["2", "3"]

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pier_node.rounds.folder import SiteRecord
from pier_node.site.settings import LISTEN, Settings

TOLD = Settings(Path("data"), listen="10.0.0.1:7701", advertise="example.org", data="/text", name="lab-a")


def test_the_first_start_goes_by_defaults() -> None:
    first = Settings(Path("data")).after(None)
    assert (first.listen, first.advertise, first.data) == (LISTEN, None, None)


def test_a_later_start_goes_on_as_the_last_one(tmp_path: Path) -> None:
    TOLD.noted(SiteRecord(founder=True, slot=2)).save(tmp_path)
    record = SiteRecord.load(tmp_path)
    assert record is not None
    assert (record.founder, record.slot) == (True, 2)
    later = Settings(Path("data")).after(record)
    assert (later.listen, later.advertise, later.data) == (TOLD.listen, TOLD.advertise, TOLD.data)


@pytest.mark.parametrize("key", ["listen", "advertise", "data"])
def test_what_is_told_now_counts(key: str) -> None:
    record = TOLD.noted(SiteRecord(founder=True, slot=2))
    later = Settings(Path("data"), **{key: "127.0.0.1:0"}).after(record)  # type: ignore[arg-type]
    assert getattr(later, key) == "127.0.0.1:0"
    others = {"listen", "advertise", "data"} - {key}
    assert all(getattr(later, other) == getattr(TOLD, other) for other in others)


@pytest.mark.parametrize(
    ("before", "now", "shared"),
    [
        (TOLD, Settings(Path("data")), False),
        (replace(TOLD, shared_data=True), Settings(Path("data")), True),
        (replace(TOLD, shared_data=True), Settings(Path("data"), data="/other"), False),
        (TOLD, Settings(Path("data"), shared_data=True), True),
    ],
)
def test_whether_data_is_shared_is_kept_with_its_path(before: Settings, now: Settings, shared: bool) -> None:
    assert now.after(before.noted(SiteRecord(founder=True, slot=2))).shared_data == shared


def test_a_site_of_before_it_was_noted_goes_by_defaults() -> None:
    assert Settings(Path("data")).after(SiteRecord(founder=True, slot=0)).listen == LISTEN

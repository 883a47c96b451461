from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo.seen import event, record

from pier_node.demo.report import measured


def test_golden_numbers(tmp_path: Path) -> None:
    result = measured(record(tmp_path, rounds=10), seconds=12.5)
    assert (result.algorithm, result.steps, result.rounds, result.inner_steps) == ("pier", 200, 10, 20)
    assert (result.initial_loss, result.final_loss) == (5.25, 3.25)
    assert result.initial_bits_per_byte == pytest.approx(7.574149)
    assert result.final_bits_per_byte == pytest.approx(4.688759)
    assert result.synchronous_bytes == pytest.approx(1_106_875_733.33)
    assert result.mean_bytes_sent == 10_000_000
    assert result.saving == pytest.approx(110.6875733)
    assert result.utilisation == pytest.approx(0.9)
    assert (result.digests_equal, result.rounds_compared) == (True, 9)


def test_utilisation_is_the_mean_of_those_that_know_theirs(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=9)
    for name, part in (("alpha", 0.5), ("beta", 0.8), ("gamma", None)):
        seen.saw_event(name, event(name, 10, utilisation=part))
    result = measured(seen, seconds=1.0)
    assert result.utilisation == pytest.approx(0.65)
    assert [site.utilisation for site in result.sites] == [0.5, 0.8, None]


def test_a_site_that_died(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=4)
    seen.tracks["beta"].code = -9
    for number in range(5, 11):
        for name in ("alpha", "gamma"):
            seen.saw_event(name, event(name, number))
    result = measured(seen, seconds=1.0)
    assert [site.finished for site in result.sites] == [True, False, True]
    assert (result.sites[1].exit_code, result.sites[1].round) == (-9, 4)


def test_nothing_sent_is_no_saving(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=1)
    seen.saw_event("alpha", event("alpha", 2, bytes_sent=1_000_000))
    for track in seen.tracks.values():
        track.event["bytes_sent"] = 0
    assert measured(seen, seconds=1.0).saving is None


def test_json_has_all_of_it(tmp_path: Path) -> None:
    written = json.loads(json.dumps(measured(record(tmp_path, rounds=10), seconds=12.5).as_json()))
    assert written["sites"][0]["name"] == "alpha"
    assert written["validation"][0] == [0, 5.25]
    assert written["seconds"] == 12.5

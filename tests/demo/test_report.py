from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from demo.seen import event, record
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pier_node.demo.replicas import Result, draw, measured, report, smoothed


def shown(result: Result) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(report(result, "def [b]go(self):", {"model": Path("/somewhere/model")}))
    return capture.get()


def test_everything_is_said(tmp_path: Path) -> None:
    text = shown(measured(record(tmp_path, rounds=10), seconds=83.0))
    assert "5.250 → 3.250 nats a byte, 7.574 → 4.689 bits a byte" in text
    assert "10 MB: 110.7 times less than synchronous training" in text
    assert "1.11 GB: 2·4·P·(n−1)/n bytes a step, P = 1,037,696, n = 3, 200 steps" in text
    assert "the same bits at all sites after each of the 9 rounds that they share" in text
    assert "90 % of the time in inner steps" in text
    assert "1:23 for 200 inner steps in 10 rounds" in text
    assert "def [b]go(self):" in text
    assert "/somewhere/model" in text


def test_bad_news_is_said(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=10)
    seen.tracks["beta"].code, seen.tracks["beta"].event["round"] = -9, 4
    text = shown(replace(measured(seen, seconds=1.0), digests_equal=False, utilisation=None, saving=None))
    assert "did NOT hold the same bits" in text
    assert "ended with exit code -9 after round 4" in text
    assert "times less" not in text
    assert "of the time" not in text


def test_in_pairs_the_distance_between_the_sites_is_said(tmp_path: Path) -> None:
    text = shown(replace(measured(record(tmp_path, rounds=10), seconds=83.0), spread=0.00456))
    assert "a model at each site, with a standard deviation of 4.56e-03 between them" in text
    assert "same bits" not in text


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
    written = json.loads(json.dumps(asdict(measured(record(tmp_path, rounds=10), seconds=12.5))))
    assert written["sites"][0]["name"] == "alpha"
    assert written["validation"][0] == [0, 5.25]
    assert written["seconds"] == 12.5


def test_golden_smoothing() -> None:
    # 4, then (0.85 · 0.15 · 4 + 0.15 · 2) / (0.85 · 0.15 + 0.15)
    smooth = smoothed([(0, 4.0), (5, 2.0)])
    assert [step for step, _ in smooth] == [0, 5]
    assert [loss for _, loss in smooth] == pytest.approx([4.0, 0.81 / 0.2775])


@given(st.lists(st.floats(-100, 100), min_size=1))
def test_smoothing_stays_among_the_values(values: list[float]) -> None:
    smooth = [value for _, value in smoothed(list(enumerate(values)))]
    assert len(smooth) == len(values)
    assert min(values) - 1e-9 <= min(smooth)
    assert max(smooth) <= max(values) + 1e-9


def test_a_picture_is_written(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=10)
    seen.tracks["gamma"].loss.clear()
    draw(seen, tmp_path / "loss.png")
    head = (tmp_path / "loss.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1080, 600)

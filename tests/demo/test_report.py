from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from demo.seen import record
from rich.console import Console

from pier_node.demo.report import Result, measured, report


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

from __future__ import annotations

from pathlib import Path

import pytest
from demo.seen import event, record
from rich.console import Console, RenderableType

from pier_node.demo.picture import agreement, clock, line, phase, picture
from pier_node.demo.record import Record


def shown(renderable: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_before_anything_is_known(tmp_path: Path) -> None:
    seen = Record(record(tmp_path).config, ["alpha", "beta", "gamma"])
    text = shown(picture(seen, 0.0))
    assert text.count("starting up") == 3
    assert "validation loss  not measured yet" in text
    assert "nothing to compare yet" in text


def test_in_the_middle_of_a_run(tmp_path: Path) -> None:
    text = shown(picture(record(tmp_path, rounds=5), 75.0))
    assert "1,037,696 parameters, 3 sites, pier: a round every 20 inner steps" in text
    (alpha,) = (row for row in text.splitlines() if "alpha" in row)
    assert alpha.strip("│ ").split() == [
        *("alpha", "training"), "━" * 9, *("100/200", "5", "1,234", "4.500", "5", "MB", "0.25", "s")
    ]  # fmt: skip
    assert "5.250 → 4.250 nats a byte" in text
    assert "✓ same bits at all sites  4 rounds compared, digest 000000000000" in text
    assert "sent by a site until now: 5 MB; gradients at every step would be 553 MB, 110.7 times as much" in text
    assert "1:15" in text


def test_the_start_is_made_for_all(tmp_path: Path) -> None:
    seen = record(tmp_path)
    seen.tracks["beta"].saw_status(event("beta", 0, phase="catching up"))
    assert phase(seen.tracks["alpha"], seen).plain == "training for all"
    assert phase(seen.tracks["beta"], seen).plain == "waits for the start"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("training", "training"),
        ("waiting", "waiting for others"),
        ("exchanging", "exchanging"),
        ("catching up", "fetching the state"),
        ("starting", "starting up"),
    ],
)
def test_phases_in_words(tmp_path: Path, said: str, words: str) -> None:
    seen = record(tmp_path, rounds=3)
    seen.tracks["beta"].saw_status(event("beta", 3, phase=said))
    assert phase(seen.tracks["beta"], seen).plain == words


@pytest.mark.parametrize(("code", "words"), [(-9, "DIED (exit code -9)"), (0, "left")])
def test_a_site_that_is_gone(tmp_path: Path, code: int, words: str) -> None:
    seen = record(tmp_path, rounds=3)
    seen.tracks["beta"].code = code
    assert phase(seen.tracks["beta"], seen).plain == words


def test_different_bits_are_shouted(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=3)
    seen.saw_event("beta", event("beta", 3, digest="f" * 64))
    assert agreement(seen).plain == "DIGESTS DIFFER after rounds [3]"
    assert "red" in str(agreement(seen).style)


def test_one_line(tmp_path: Path) -> None:
    assert line(record(tmp_path, rounds=2), 65.0) == (
        "[1:05] round 2/10  step 40/200  3,704 tokens/s  validation loss 4.850  6 MB sent  "
        "✓ same bits at all sites  1 round compared, digest 000000000000"
    )


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0.0, 59.9, 61.0, 3600.0)] == ["0:00", "0:59", "1:01", "60:00"]

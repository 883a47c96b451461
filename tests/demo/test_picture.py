from __future__ import annotations

import io
from pathlib import Path

import pytest
from demo.seen import event, record
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pier_node.demo.picture import EIGHTHS, LINE_SECONDS, agreement, bars, clock, line, phase, picture, screen_on
from pier_node.demo.record import Record


def shown(renderable: RenderableType, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_before_anything_is_known(tmp_path: Path) -> None:
    seen = Record(record(tmp_path).config, ["alpha", "beta", "gamma"])
    text = shown(picture(seen, 0.0))
    assert text.count("starting") == 3
    assert "validation loss  not measured yet" in text
    assert "nothing to compare yet" in text


def test_in_the_middle_of_a_run(tmp_path: Path) -> None:
    text = shown(picture(record(tmp_path, rounds=5), 75.0))
    assert "1,037,696 parameters, 3 sites, pier: a round every 20 inner steps" in text
    (alpha,) = (row for row in text.splitlines() if "alpha" in row)
    assert alpha.strip("│ ").split() == [
        *("alpha", "training"), "━" * 16 + "╸", *("100/200", "1,234", "4.500", "5", "MB", "5", "0.25", "s")
    ]  # fmt: skip
    assert "5.250 → 4.250 nats a byte" in text
    assert "✓ same bits at all sites  4 rounds compared, digest 000000000000" in text
    assert "sent by a site: 5 MB; averaging gradients at every step: 553 MB (110.7x)" in text
    assert "1:15" in text


def test_it_fits_into_a_small_terminal(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=5)
    for track in seen.tracks.values():
        track.saw_status(
            {**track.status, "phase": "catching up", "tokens_per_second": 98_765.0, "bytes_sent": 987_654_321}
        )
    assert "…" not in shown(picture(seen, 75.0), width=80)


def test_the_start_is_made_for_all(tmp_path: Path) -> None:
    seen = record(tmp_path)
    seen.tracks["beta"].saw_status(event("beta", 0, phase="catching up"))
    assert phase(seen.tracks["alpha"], seen).plain == "trains for all"
    assert phase(seen.tracks["beta"], seen).plain == "waits for start"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("training", "training"),
        ("waiting", "waiting"),
        ("exchanging", "exchanging"),
        ("catching up", "fetching state"),
        ("starting", "starting"),
    ],
)
def test_phases_in_words(tmp_path: Path, said: str, words: str) -> None:
    seen = record(tmp_path, rounds=3)
    seen.tracks["beta"].saw_status(event("beta", 3, phase=said))
    assert phase(seen.tracks["beta"], seen).plain == words


@pytest.mark.parametrize(("code", "words"), [(-9, "DIED, code -9"), (0, "left")])
def test_a_site_that_is_gone(tmp_path: Path, code: int, words: str) -> None:
    seen = record(tmp_path, rounds=3)
    seen.tracks["beta"].code = code
    assert phase(seen.tracks["beta"], seen).plain == words


def test_different_bits_are_shouted(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=3)
    seen.saw_event("beta", event("beta", 3, digest="f" * 64))
    assert agreement(seen).plain == "DIGESTS DIFFER after rounds [3]"
    assert "red" in str(agreement(seen).style)


def test_in_pairs_it_says_how_far_apart_the_sites_are(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=2, algorithm="noloco")
    assert agreement(seen).plain == "a model at each site  spread between them not known yet"
    seen.saw_event("alpha", event("alpha", 3, spread=0.00123, digest="f" * 64))
    assert agreement(seen).plain == "a model at each site  spread between them 1.23e-03"


def test_one_line(tmp_path: Path) -> None:
    assert line(record(tmp_path, rounds=2), 65.0) == (
        "[1:05] round 2/10  step 40/200  3,704 tokens/s  validation loss 4.850  6 MB sent  "
        "✓ same bits at all sites  1 round compared, digest 000000000000"
    )


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0.0, 59.9, 61.0, 3600.0)] == ["0:00", "0:59", "1:01", "60:00"]


Curve = list[tuple[int, float]]
curves = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20).map(lambda values: list(enumerate(values)))


def test_a_falling_curve() -> None:
    # Logarithmic: from 8 to 1 in 15 eighths of two lines, 5 for each halving.
    assert bars([(0, 8.0), (10, 4.0), (20, 2.0), (30, 1.0)], end=30, width=4, height=2) == ["█▃  ", "██▆▁"]


def test_a_part_of_the_width_for_a_part_of_the_run() -> None:
    rows = bars([(0, 4.0), (50, 2.0)], end=100, width=11, height=1)
    assert rows == ["█████▁"]


def test_nothing_yet() -> None:
    assert bars([], end=100, width=10, height=3) == ["", "", ""]


def test_a_level_curve() -> None:
    assert bars([(0, 2.0), (9, 2.0)], end=9, width=3, height=1) == ["▁▁▁"]


@given(curves, st.integers(1, 40), st.integers(1, 6))
def test_the_drawing_keeps_to_its_box(curve: Curve, width: int, height: int) -> None:
    rows = bars(curve, end=curve[-1][0], width=width, height=height)
    assert len(rows) == height
    assert {len(row) for row in rows} <= {width if curve[-1][0] else 1}
    assert all(letter in EIGHTHS for row in rows for letter in row)
    assert " " not in rows[-1]


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path: Path) -> None:
    output, seen = io.StringIO(), record(tmp_path, rounds=3)
    with screen_on(Console(file=output, width=40)) as screen:
        for seconds in (0.0, 1.0, LINE_SECONDS - 0.1, LINE_SECONDS, LINE_SECONDS + 1):
            screen.show(seen, seconds)
        screen.tell("[beta] is gone")
    lines = output.getvalue().splitlines()
    assert [line[:6] for line in lines] == ["[0:00]", "[0:05]", "[beta]"]
    assert "\x1b" not in output.getvalue()


def test_a_live_picture_in_a_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, height=40, _environ={"TERM": "xterm"})
    with screen_on(console) as screen:
        screen.show(record(tmp_path, rounds=3), 1.0)
        screen.tell("beta is gone")
        screen.show(record(tmp_path, rounds=4), 2.0)
    assert output.getvalue().count("Ctrl+C ends everything") >= 2
    assert "beta is gone" in output.getvalue()
    assert "\x1b[2K" in output.getvalue()

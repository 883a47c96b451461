from __future__ import annotations

from typing import Any

import pytest

from pier_coordinator.runs.alerts import payload, shorter_exchange
from pier_coordinator.runs.timings import Segment

RUN: dict[str, Any] = {"codec": "none", "inner_steps": 50, "parameters": 5_000_000}


def segments(compute: float, sent: float) -> list[Segment]:
    return [Segment(round, 0.0, compute, 0.0, 5.0, 0.0, sent * round) for round in (1, 2, 3)]


def test_the_payload_is_as_measured_or_else_as_the_model_is_large() -> None:
    assert payload(RUN, segments(10, 7e6)) == 7e6
    assert payload(RUN, []) == 2 * 4 * 5_000_000
    assert payload({"codec": "topk", "parameters": 5}, []) is None
    assert payload({}, segments(10, 0)) is None


@pytest.mark.parametrize(
    ("codec", "steps", "sent", "uplink", "advice"),
    [
        ("none", 50, 5e6, 0.5e6, "try codec int4 or H = 200"),  # 10 s of 10 s: four times too long; int4 is 7.7 times
        ("none", 50, 40e6, 0.5e6, "try codec int4 and H = 250"),  # 80 s: 32 times
        ("bf16", 50, 5e6, 0.5e6, "try codec int4 and H = 55"),
        ("int4", 50, 5e6, 0.5e6, "try H = 200"),
        ("topk", 50, 5e6, 0.5e6, "try H = 200"),
        ("int4", None, 5e6, 0.5e6, "try 4 times as many inner steps between rounds"),
    ],
)
def test_it_says_which_codec_or_how_many_steps(codec: str, steps: int, sent: float, uplink: float, advice: str) -> None:
    run = {"codec": codec, "inner_steps": steps}
    assert shorter_exchange(run, segments(10, sent), uplink) == advice


def test_a_fast_line_is_not_to_blame() -> None:
    assert shorter_exchange(RUN, segments(10, 1e6), 50e6).startswith("its line is fast enough for this run")


def test_a_pipeline_has_no_codec() -> None:
    assert shorter_exchange({**RUN, "stages": 4}, segments(10, 5e6), 0.5e6).startswith("its log says what it fetches")


@pytest.mark.parametrize(("rows", "uplink"), [(segments(10, 1e6), None), ([], 1e6), (segments(0, 1e6), 1e6)])
def test_without_figures_it_says_how_to_get_them(rows: list[Segment], uplink: float | None) -> None:
    assert shorter_exchange({"codec": "none"}, rows, uplink).startswith("measure its line with pier-node doctor")

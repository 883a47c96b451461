from __future__ import annotations

import asyncio
from pathlib import Path

from bench.coordinator_day import SAMPLES, day
from pier_coordinator.identity.home import RUN_FILE, Home


def test_two_hours_of_three_sites(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text('[run]\nname = "bench"\nsites = 3\n')
    found = asyncio.run(day(Home.found(tmp_path), sites=3, hours=2))
    assert [(each.hour, each.facts) for each in found.hours] == [(1, 180 * (SAMPLES + 2)), (2, 360 * (SAMPLES + 2))]
    assert found.same_totals
    assert 1.9 < found.curve_hours < 2.1

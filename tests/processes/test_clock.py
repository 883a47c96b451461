"""A site whose clock jumps by a day while it trains, and is still wrong when it starts again.

libfaketime makes it so for the whole process, TLS included; monotonic clocks do not jump on a real machine either.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.run import ENDLESS, Found

DAY = 86400.0
NEAR = 3600.0
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not LIBRARIES, reason="no libfaketime (Debian: faketime): a clock that jumps is NOT tested"),
]


class Clock:
    """The clock of a program; it is right until it jumps."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump("+0")

    def command(self, program: list[str]) -> list[str]:
        """What runs the program by this clock."""
        ways = {"TIMESTAMP_FILE": self._file, "CACHE_DURATION": 1, "DONT_FAKE_MONOTONIC": 1}
        preload = f"LD_PRELOAD={LIBRARIES[0]}"
        return ["env", preload, *(f"FAKETIME_{key}={value}" for key, value in ways.items()), *program]

    def jump(self, way: str) -> None:
        """To +1d or -1d from the right time."""
        new = self._file.with_suffix(".new")
        new.write_text(way)
        new.rename(self._file)


@pytest.mark.parametrize(("way", "off"), [("+1d", DAY), ("-1d", -DAY)])
def test_a_clock_that_jumps_by_a_day(found: Found, tmp_path: Path, way: str, off: float) -> None:
    run, clock = found(3, inner=ENDLESS), Clock(tmp_path / "clock")
    wrong, *right = reversed(run.sites)
    wrong.command = clock.command(wrong.command)
    run.start()
    for site in run.sites:
        site.reach(3)

    clock.jump(way)
    seen = max(site.round for site in run.sites)
    for site in run.sites:
        site.reach(seen + 5)
    jumped = wrong.events()[-1]["time"] - right[0].events()[-1]["time"]
    assert abs(jumped - off) < NEAR, "the clock did not jump: nothing was tested"
    assert wrong.events()[-1]["members"] == right[0].events()[-1]["members"] == sorted(site.node for site in run.sites)

    assert wrong.stop() == 0
    wrong.start()
    wrong.rejoin()
    run.stop()

from __future__ import annotations

import click
import pytest

from pier_coordinator.commands.options import Duration


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("24h", 86400.0), ("7d", 604800.0)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "-1h", "0h", "1.5h", "2w"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 30m, 24h or 7d"):
        Duration().convert(text, None, None)

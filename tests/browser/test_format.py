"""The page's scripts that only compute: numbers read as they do on the command line, and curves are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from coordinator.page_cases import serving

from pier_coordinator.runs.read_model import ReadModel
from pier_node.base import units

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import looking

pytestmark = pytest.mark.browser

CASES: dict[str, tuple[Callable[[Any], str], list[Any]]] = {
    "bytes": (units.amount, [0, 12, 999.6, 12_345_678, 1.06e12]),
    "rate": (units.rate, [12_500, 500_000, 35.5e6, 250e6]),
    "seconds": (units.seconds, [0.0123, 0.4, 1.5, 33.84]),
    "age": (units.age, [5, 119, 300, 7200, 86_400 * 3]),
    "span": (units.span, [0.51, 45.23, 119.9, 740, 8460, 400_000]),
    "count": (units.count, [0, 12_345, 9.6, None]),
    "percent": (units.percent, [0, 0.874, 1, None]),
}


async def test_numbers_read_as_on_the_command_line(chromium: Browser) -> None:
    async with serving(ReadModel()) as address, looking(chromium, address) as look:
        for name, (python, values) in CASES.items():
            script = (
                f"async (values) => {{ const it = await import('/static/format.js'); return values.map(it.{name}) }}"
            )
            assert await look.page.evaluate(script, values) == [python(value) for value in values]


async def test_there_may_be_one_of_a_thing(chromium: Browser) -> None:
    script = """async (values) => { const it = await import('/static/format.js');
        return values.map((value) => it.several(value, 'round')) }"""
    values = [0, 1, 2, 12_345]
    async with serving(ReadModel()) as address, looking(chromium, address) as look:
        assert await look.page.evaluate(script, values) == [units.several(value, "round") for value in values]


async def test_what_is_not_known_is_a_dash(chromium: Browser) -> None:
    script = """async () => { const it = await import('/static/format.js');
        return [it.bytes, it.rate, it.seconds, it.age, it.speed, it.big, it.count].map((show) => show(null)) }"""
    async with serving(ReadModel()) as address, looking(chromium, address) as look:
        assert await look.page.evaluate(script) == [units.UNKNOWN] * 7


async def test_a_curve_takes_what_changed_and_begins_anew_when_told(chromium: Browser) -> None:
    script = """async () => { const { joined } = await import('/static/store.js');
        const points = (x, mean, reset) => ({ x, mean, min: mean, max: mean, reset });
        const first = joined(undefined, points([1, 2], [5, 6], false));
        const more = joined(first, points([2, 3], [7, 8], false));
        const told = [...more.entries()].map(([x, values]) => [x, values[0]]);
        return [told, [...joined(more, points([0], [9], true)).keys()]] }"""
    async with serving(ReadModel()) as address, looking(chromium, address) as look:
        assert await look.page.evaluate(script) == [[[1, 5], [2, 7], [3, 8]], [0]]

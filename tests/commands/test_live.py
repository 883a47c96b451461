"""The live view of a site on a terminal: what it shows, and what it leaves behind."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.commands.daemon import LiveView

STATUS: dict[str, Any] = {
    "phase": "training",
    "round": 3,
    "rounds": 20,
    "inner_step": 187,
    "total_steps": 1000,
    "round_steps": 50,
    "round_steps_done": 37,
    "loss": 1.8858,
    "tokens_per_second": 2183.4,
    "message": "",
    "peers": [],
}
PEERS = [
    {"name": "lab-b", "node": "b" * 16, "alive": True, "phase": "training"},
    {"name": "", "node": "c" * 16, "alive": True, "phase": "training"},
    {"name": "lab-d", "node": "d" * 16, "alive": False, "phase": "training"},
]


def shown(**changes: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    view = LiveView(console, lambda: None)
    view.render({**STATUS, "inner_step": 180}, 100.0)
    with console.capture() as captured:
        console.print(view.render({**STATUS, **changes}, 107.0))
    return captured.get()


def test_a_glance_is_enough() -> None:
    text = "training: round 4 of 20, step 37 of 50, loss 1.8858, 2,183 tokens/s, 13.6 min left"
    assert text in shown()


def test_what_is_not_known_is_left_out() -> None:
    told = shown(phase="starting", loss=math.nan, tokens_per_second=0.0, inner_step=180, round=20)
    assert told.split("starting: ")[1].strip() == "round 20 of 20"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"message": "waiting for 1 more of the run's 2 sites"}, "waits: waiting for 1 more of the run's 2 sites"),
        ({"peers": PEERS}, f"waits for lab-b, {'c' * 16}\n"),
    ],
)
def test_who_waits_says_for_whom(changes: dict[str, Any], told: str) -> None:
    assert told in shown(phase="waiting", **changes)
    assert "waits" not in shown(**changes)


async def test_the_terminal_is_left_as_it_was() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=80), lambda: STATUS)

    async def fail() -> None:
        async with view.shown():
            raise PierError("the disk is full")

    with pytest.raises(PierError):
        await fail()
    hidden, _, end = out.getvalue().rpartition("\x1b[?25l")
    assert "\x1b[?25h" in end, "the cursor is there"
    assert hidden == ""

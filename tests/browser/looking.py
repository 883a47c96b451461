"""Somebody who looks at a page, and hears its complaints."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from coordinator.played import LABS, Played, node, pulse
from playwright.async_api import Browser, Page

from pier_coordinator.runs.read_model import ReadModel
from pier_node.config.run import InnerSection, OuterSection, RunConfig, RunSection

CONFIG = RunConfig(
    run=RunSection(name="atlantic", sites=3),
    inner=InnerSection(total_steps=5000, warmup_steps=250),
    outer=OuterSection(codec="bf16"),
)
A, B, C = (node(lab.name) for lab in LABS)


@dataclass
class Look:
    """A page that is open; `errors` is what its console complained of."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def number(self, script: str) -> float:
        """What a script comes to. (Not wait_for_function: that needs eval, which the page forbids.)"""
        return float(await self.page.evaluate(script))


@asynccontextmanager
async def looking(browser: Browser, address: str, **how: Any) -> AsyncIterator[Look]:
    """Open the page at a size, in a colour scheme, ... (see Playwright's new_context)."""
    context = await browser.new_context(**{"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark", **how})
    look = Look(await context.new_page())
    look.page.on("console", lambda said: look.errors.append(said.text) if said.type == "error" else None)
    look.page.on("pageerror", lambda error: look.errors.append(str(error)))
    try:
        await look.page.goto(address)
        yield look
    finally:
        await context.close()


def run_of_three(rounds: int = 63, late: int = 3, name: str = "atlantic") -> ReadModel:
    """A live board whose run began so long ago that its last round has just ended."""
    made = Played(rounds=rounds, late=late, run={"name": name})
    made.start = time.time() - (made.end - made.start)
    board = ReadModel(config=CONFIG)
    for fact in made.facts():
        board.apply(fact)
    for lab, phase in zip(LABS, ("PHASE_EXCHANGING", "PHASE_CATCHING_UP", "PHASE_TRAINING")):
        done = rounds - late if lab.name == "lab-b" else rounds
        board.pulse(node(lab.name), pulse(lab, done, 0.0, phase), alive=True)
    return board


def size(told: dict[str, Any]) -> int:
    """Bytes of its JSON."""
    return len(json.dumps(told, separators=(",", ":")))

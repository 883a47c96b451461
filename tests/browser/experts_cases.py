"""A plan of experts on a page: some done, some under way, one that nobody can train."""

from __future__ import annotations

import time
from typing import Any

from browser.looking import A, B, C, run_of_three

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

PLAN = "ab" * 16
DONE: dict[str, Any] = {"done": True, "standard_error": 0.011, "accepted": True}
EXPERTS = (
    ("topics", "L", 30, A, 14.1),
    ("formats", "S", 51, C, 40.6),
    ("numbers", "S", 107, B, 45.0),
    ("network", "M", 40, A, 18.2),
    ("encodings", "S", 60, A, 24.0),
    ("tools", "M", 45, "", 20.0),
)


def planned(*experts: tuple[str, str, int, str, float]) -> Fact:
    keys = ("domain", "size", "steps", "node", "planned_seconds")
    rows = [{"number": number, **dict(zip(keys, each))} for number, each in enumerate(experts)]
    body = {"plan": PLAN, "accepted": 1.0, "mode": "auto", "seconds": 56.3, "experts": rows}
    return Fact(time.time(), "plan", "", body)


def said(node: str, job: int, **body: Any) -> Fact:
    return Fact(time.time(), "expert", node, {"plan": PLAN, "job": job, "done": False, "problem": "", **body})


def board_with_experts() -> ReadModel:
    """One is accepted, one refused, two are being trained."""
    board = run_of_three()
    board.apply(planned(*EXPERTS))
    board.apply(said(A, 0, loss=2.11, parent_loss=2.54, **DONE))
    board.apply(said(C, 1, loss=2.61, parent_loss=2.6, **{**DONE, "accepted": False}))
    board.apply(said(B, 2, step=60, training_loss=1.7))
    board.apply(said(A, 3, step=10, training_loss=1.62))
    return board

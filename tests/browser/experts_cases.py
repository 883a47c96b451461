"""A plan of experts on a page: some done, some under way, one that nobody can train."""

from __future__ import annotations

from typing import Any

from browser.looking import A, B, C, run_of_three

from pier_coordinator.runs.read_model import ReadModel

NAMES = {A: "lab-a", B: "lab-b", C: "lab-c", "": ""}
EXPERTS = (
    ("topics", "L", 30, A, 14.1),
    ("formats", "S", 51, C, 40.6),
    ("numbers", "S", 107, B, 45.0),
    ("network", "M", 40, A, 18.2),
    ("encodings", "S", 60, A, 24.0),
    ("tools", "M", 45, "", 20.0),
)
DONE = {"error": 0.011, "state": "accepted"}


def planned(*experts: tuple[str, str, int, str, float], **rows: dict[str, Any]) -> dict[str, Any]:
    """The plan as the page gets it; by domain, what has changed of an expert."""
    keys = ("domain", "size", "steps", "node", "seconds")
    shown: list[dict[str, Any]] = [{"number": number, **dict(zip(keys, each))} for number, each in enumerate(experts)]
    for row in shown:
        row |= {"site": NAMES[row["node"]], "state": "waiting" if row["node"] else "nobody", "done": 0}
        row |= {**dict.fromkeys(("loss", "parent_loss", "error")), **rows.get(row["domain"], {})}
    return {"plan": "ab" * 16, "mode": "auto", "seconds": 56.3, "rows": shown}


PROGRESS: dict[str, dict[str, Any]] = {
    "topics": {"done": 30, "loss": 2.11, "parent_loss": 2.54, **DONE},
    "formats": {"done": 51, "loss": 2.61, "parent_loss": 2.6, **DONE, "state": "refused"},
    "numbers": {"done": 60, "loss": 1.7, "state": "training"},
    "network": {"done": 10, "loss": 1.62, "state": "training"},
}


def board_with_experts() -> ReadModel:
    """One is accepted, one refused, two are being trained."""
    board = run_of_three()
    board.planned(planned(*EXPERTS, **PROGRESS))
    return board

"""Runs that nobody has to wait for: what sites would have said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pier_node.config.run import RunConfig, load
from pier_node.demo.record import Record
from pier_node.demo.replicas import write_run

NODES = {"alpha": "a" * 16, "beta": "b" * 16, "gamma": "c" * 16}


def event(name: str, round: int, **more: Any) -> dict[str, Any]:
    """A line of events.jsonl, or an answer of /status: rounds of 20 steps, everybody a member from round 2 on."""
    return {
        "pid": 1,
        "node": NODES[name],
        "address": "127.0.0.1:7700",
        "phase": "training",
        "round": round,
        "inner_step": 20 * round,
        "digest": f"{round:064x}",
        "members": [NODES["alpha"]] if round < 2 else sorted(NODES.values()),
        "tokens": 10_000 * round,
        "tokens_per_second": 1234.5,
        "loss": 5.0 - round / 10,
        "validation_loss": 5.25 - round / 5,
        "spread": None,
        "bytes_sent": 1_000_000 * round,
        "round_seconds": 0.25,
        "utilisation": 0.9,
        "message": "",
        **more,
    }


def run_of(folder: Path, sites: int, algorithm: str, steps: int) -> RunConfig:
    """The run of a demo, as its sites read it."""
    write_run(folder / "run.toml", sites, algorithm, steps)
    return load(folder / "run.toml")


def record(folder: Path, rounds: int = 0, algorithm: str = "pier") -> Record:
    """Of three sites and 200 steps: round 0 and 1 by alpha alone, then `rounds` in all by everybody."""
    seen = Record(run_of(folder, 3, algorithm, 200), list(NODES))
    for number in range(rounds + 1):
        for name in NODES if number > 1 else ["alpha"]:
            seen.saw_event(name, event(name, number))
            seen.tracks[name].saw_status(event(name, number))
    return seen

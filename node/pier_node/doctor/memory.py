"""Host memory that a site needs when sites exchange, against what is free.

The outer state lives in the daemon, fp32, in vectors of one element a parameter; `vectors` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from pier_node.config import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.model.memory import STATE
from pier_node.outer.ahead import HELD
from pier_node.outer.noloco import needs_anchors
from pier_node.units import amount

FLOAT = 4
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Vectors:
    """How many vectors of a whole model the daemon holds at once.

    Attributes:
        always: by what they are, at the end of every round.
        at_times: more of them: a round went on without this site; a newcomer fetches the run's state from it.
    """

    always: dict[str, int]
    at_times: dict[str, int]

    @property
    def usual(self) -> int:
        """In every round."""
        return sum(self.always.values())

    @property
    def most(self) -> int:
        """When everything comes together."""
        return self.usual + sum(self.at_times.values())


def vectors(config: RunConfig) -> Vectors:
    """What the daemon holds; a state has AdamW's moments in it where gradients are exchanged."""
    outer = config.outer
    state = 4 if "sync" in (outer.algorithm, outer.start) else 2
    anchors = outer.algorithm == "noloco" and needs_anchors(outer.noloco)
    means = 2 if anchors else 1
    always = {"state": state, "shadow": state, "mean": means, "outbox": 1, "AdamW's moments": 2, "pending": 1}
    at_times = {"state that is served": state, "moments that are served": 2}
    if anchors:
        at_times["anchors of partners"] = HELD
    (always if outer.overlap or outer.fragments > 1 else at_times)["start from pending"] = 1
    if outer.codec != "none":
        always["residual"] = 1
        (always if outer.overlap else at_times).update({"contribution": 1, "its error": 1})
    return Vectors(always, at_times)


def memory_finding(config: RunConfig, parameters: int, cpu_workers: int, held: int, free: int) -> Finding:
    """Whether the memory is enough.

    Args:
        cpu_workers: of this site, still to be started.
        held: bytes that a running daemon has taken of this already.
        free: bytes.
    """
    copies = vectors(config)
    workers = STATE * parameters * cpu_workers
    usual, most = (max(0, FLOAT * parameters * number - held) + workers for number in (copies.usual, copies.most))
    detail = f"up to {amount(most)} {'more ' if held else ''}needed when sites exchange; {amount(free)} free"
    values = {
        "usual_bytes": usual,
        "most_bytes": most,
        "free_bytes": free,
        "bytes_a_parameter": FLOAT * copies.most,
    }
    if free >= most:
        return Finding(THIS_SITE, "memory", Verdict.OK, detail, "", values)
    verdict = Verdict.ADVICE if free >= usual else Verdict.PROBLEM
    remedy = (
        f"Free {amount(most - free)} of memory here, or run a smaller model: the daemon holds up to {copies.most} fp32 "
        f"copies of it ({FLOAT * copies.most} bytes a parameter)."
    )
    return Finding(THIS_SITE, "memory", verdict, detail, remedy, values)


def free_memory() -> int:
    """Bytes that can be had: of the machine, or of the container if that has a limit."""
    return min([psutil.virtual_memory().available, *_container_room(_CGROUP)])


def held_memory(pid: int) -> int:
    """Bytes of shared memory in a daemon: its vectors."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _container_room(cgroup: Path) -> list[int]:
    """What a limit of control groups (version 2) leaves; [] without one. Cached files give way: they do not count."""
    if not (cgroup / "memory.max").exists() or (limit := (cgroup / "memory.max").read_text().strip()) == "max":
        return []
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    return [max(0, int(limit) - used)]

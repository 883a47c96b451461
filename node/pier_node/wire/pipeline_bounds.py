"""What the messages of a pipeline may hold; bounds.py has the others."""

from __future__ import annotations

from google.protobuf.message import Message

from pier.v1.peer_pb2 import Dropped, Itinerary, Passage, Path, Place, Total, Worked
from pier_node.config import SITES
from pier_node.wire.rules import Many, Only, Part, Rule, Table
from pier_node.wire.values import AMOUNT, ANY, COUNT, HASH, NODE, NODES, REASON, below, one_of, or_empty

STAGES, MICROBATCHES, SIDE = 1024, 10_000, 2**31
"""Most stages of a pipeline, microbatches of an iteration, and elements along one side of what travels."""
STAGE = below(STAGES)
SECONDS = Only("from 0 to 1e6", lambda value: 0 <= value <= 1e6)
"""Of a task or a transfer: the planner of paths takes no longer ones (pier_coordinator/paths/problem.py)."""
STATE_STAGE = below(STAGES + 1)
"""A stage whose state is meant, counted from 1; 0: the state of the run."""

PIPELINE: dict[type[Message], dict[str, Rule]] = {
    Place: {
        "stage": STAGE,
        "version": COUNT,
        "forward": SECONDS,
        "backward": SECONDS,
        "loss": SECONDS,
        "memory": below(MICROBATCHES),
        "transfer": Table(NODE, SECONDS, SITES),
        "round_trip": Table(NODE, SECONDS, SITES),
        "working": ANY,
    },
    Itinerary: {
        "round": COUNT,
        "step": COUNT,
        "nodes": NODES,
        "stages": Many(STAGE, SITES),
        "paths": Many(Part(), MICROBATCHES),
        "waves": Many(below(MICROBATCHES + 1), MICROBATCHES),
        "newcomers": Many(STAGE, SITES),
        "candidates": NODES,
        "meet": ANY,
    },
    Path: {"sites": Many(below(SITES), STAGES)},
    Passage: {
        "attempt": HASH,
        "microbatch": below(MICROBATCHES),
        "hop": below(2 * STAGES + 1),
        "shape": Many(below(SIDE), 4),
        "dtype": one_of(Passage.Dtype.values()),
    },
    Worked: {"attempt": HASH, "square": AMOUNT, "loss": AMOUNT, "digest": or_empty(HASH), "round": COUNT},
    Total: {
        "square": AMOUNT,
        "loss": AMOUNT,
        "moved": Many(STAGE, STAGES),
        "digests": Many(HASH, STAGES),
    },
    Dropped: {"attempt": HASH, "suspect": or_empty(NODE), "reason": REASON},
}


def itinerary_flaw(plan: Itinerary) -> str:
    """What is wrong between the fields of a plan; "" if nothing is."""
    if len(plan.stages) != len(plan.nodes) or len(plan.newcomers) != len(plan.candidates):
        return "does not say of every site which stage it holds"
    if sum(plan.waves) != len(plan.paths):
        return "has other microbatches in its waves than paths"
    return ""

"""Predicts for how long a site's daemon computes at the boundary of a round, by doing it now with a small model.

It takes what a round takes: what was learned, the code of it, the outer step, the digest of the new state. Each value
is encoded once and decoded three times: for the residual, for the mean, and as a mean. Its time grows with the model.
"""

from __future__ import annotations

import time

import numpy as np

from pier_node.base.shared import SharedVector
from pier_node.base.units import seconds
from pier_node.config.run import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.outer.advance import advance, advance_pair, get_ready
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import Kind, round_plan, total_rounds
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState, in_pieces
from pier_node.site.error_feedback import UnsentUpdate

SAMPLE = 1 << 24
"""Values of that model: more than a cache holds, in 64 MB a vector."""
DECODED = 3
"""How often a daemon decodes each value of its model, in a round of any number of sites."""


def boundary_finding(config: RunConfig, parameters: int) -> list[Finding]:
    """What the daemon computes in a round of the run; nothing for synchronous training, which has no rounds."""
    if config.outer.algorithm == "sync":
        return []
    sample = min(SAMPLE, parameters)
    took = measured(config, sample) * parameters / sample
    while_training = ", in part while workers train" if config.outer.overlap else ", while workers wait"
    detail = f"about {seconds(took)} of a round for the daemon's computing (codec {config.outer.codec}){while_training}"
    return [Finding(THIS_SITE, "boundary", Verdict.OK, detail, "", {"daemon_seconds": took})]


def measured(config: RunConfig, length: int) -> float:
    """Seconds that the daemon takes for a round of a model of this length, without fragments."""
    config = config.model_copy(update={"outer": config.outer.model_copy(update={"fragments": 1})})
    get_ready(config)
    plan, used = round_plan(config, total_rounds(config)), codec(config.outer.codec, config.outer.density)
    layout, rates = Layout.laid([("sample", (length,))]), config.outer.noloco
    state = OuterState(0, ("a",), {name: SharedVector(length) for name in (ANCHOR, MOMENTUM)}, {})
    weights = np.random.default_rng(1).standard_normal(length, np.float32)
    unsent = UnsentUpdate(length, 1, lossy=False)

    def code(piece: slice) -> None:
        data = used.encode(sent[piece])
        for _ in range(DECODED):
            mean.array[piece] = used.decode(data, piece.stop - piece.start)

    for _ in range(2):  # in the first, memory is touched for the first time
        mean, began = SharedVector.scratch(length), time.perf_counter()
        unsent.learn(state.anchor, weights, 1)
        sent = weights if plan.kind is Kind.PAIR else unsent.delta.array
        in_pieces(code, length)
        if plan.kind is Kind.PAIR:
            new = advance_pair(state, plan.round, ["a"], [mean.array, state.anchor], {}, rates)
        else:
            new = advance(state, mean, {"a": 1}, plan, layout, config.inner)
        _ = new.digest
    return time.perf_counter() - began

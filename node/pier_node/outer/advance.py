"""From one outer state to the next: what a round's plan makes of the mean that its members agreed on.

Pure: equal states and equal means give equal bits at every member.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pier_node.config import InnerSection
from pier_node.model.layout import Layout
from pier_node.outer.pier import accumulate, outer_step
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.shared import SharedVector, Vector


def advance(
    state: OuterState, mean: Vector, tokens: Mapping[str, int], plan: RoundPlan, layout: Layout, inner: InnerSection
) -> OuterState:
    """The state after a round.

    Args:
        mean: by the kind of the round the weights (solo), the mean gradient (sync) or the mean pseudo-gradient (local),
            shape [parameters]; scratch afterwards.
        tokens: what each member of the round trained on.
    """
    step = {Kind.SOLO: _solo, Kind.SYNC: _sync, Kind.LOCAL: _local}[plan.kind]
    tensors = step(state, mean, plan, layout, inner)
    ledger = {node: state.ledger.get(node, 0) + tokens.get(node, 0) for node in {*state.ledger, *tokens}}
    adam_step = state.adam_step + 1 if ADAM_M in tensors else 0
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger, adam_step)


def _solo(
    state: OuterState, mean: Vector, plan: RoundPlan, _layout: Layout, _inner: InnerSection
) -> dict[str, SharedVector]:
    """The anchor becomes the weights to the last bit; momentum warmup gathers what they moved by."""
    anchor, momentum = SharedVector.scratch(len(mean)), SharedVector.scratch(len(mean))
    anchor.array[:] = mean
    if plan.warmup:
        moved = np.subtract(state.anchor, mean, out=mean)
        accumulate(state.momentum, moved, plan.momentum, out=momentum.array)
    else:
        momentum.array.fill(0)
    return {ANCHOR: anchor, MOMENTUM: momentum}


def _sync(
    state: OuterState, mean: Vector, plan: RoundPlan, layout: Layout, inner: InnerSection
) -> dict[str, SharedVector]:
    """One AdamW step on the anchor itself. Over an interval M gathers φ_first − φ_last, step by step."""
    import torch

    from pier_node.inner.optim import step_vectors

    names = (ANCHOR, ADAM_M, ADAM_V)
    next_state = {name: SharedVector.scratch(len(mean)) for name in (*names, MOMENTUM)}
    for name in names:
        next_state[name].array[:] = state.tensors[name].array if name in state.tensors else 0
    anchor, adam_m, adam_v = (torch.from_numpy(next_state[name].array) for name in names)
    gradient = torch.from_numpy(mean)
    step_vectors(layout, anchor, (adam_m, adam_v, state.adam_step), gradient, plan.first_step, inner)
    if plan.warmup:
        moved = np.subtract(state.anchor, next_state[ANCHOR].array, out=mean)
        accumulate(state.momentum, moved, plan.momentum, out=next_state[MOMENTUM].array)
    else:
        next_state[MOMENTUM].array.fill(0)
    return next_state


def _local(
    state: OuterState, mean: Vector, plan: RoundPlan, _layout: Layout, _inner: InnerSection
) -> dict[str, SharedVector]:
    """Pier's (and DiLoCo's) outer step."""
    anchor, momentum = SharedVector.scratch(len(mean)), SharedVector.scratch(len(mean))
    outer_step(state.anchor, state.momentum, mean, plan.momentum, plan.lr, anchor.array, momentum.array)
    return {ANCHOR: anchor, MOMENTUM: momentum}

"""From one outer state to the next: apply a round's plan to the mean that its members agreed on.

Pure: equal states and equal means give equal bits at every member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import InnerSection, NolocoSection, RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.noloco import noloco_step
from pier_node.outer.pier import accumulate, outer_step
from pier_node.outer.schedule import Kind, RoundPlan, entry
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, PIECE, OuterState


def get_ready(config: RunConfig) -> None:
    """Import PyTorch, which takes seconds, if the run has synchronous rounds: otherwise the other sites would wait."""
    if "sync" in (config.outer.algorithm, config.outer.start):
        import pier_node.outer.inner_optimizer  # noqa: F401


def advance(
    state: OuterState,
    mean: Vector,
    tokens: Mapping[str, int],
    plan: RoundPlan,
    layout: Layout,
    inner: InnerSection,
    alone: Vector | None = None,
) -> OuterState:
    """The state after a round.

    Args:
        mean: mean over the members, for the fragment (or whole model) that the round syncs, shape [elements of the
            fragment]: the weights (solo), the gradient (sync) or the pseudo-gradient (local); overwritten as scratch
            memory.
        tokens: tokens that each member of the round trained on.
        alone: weights θ of the only member, shape [parameters]: if the outer step is the identity, the new anchor is θ
            to the last bit wherever the mean is φ − θ.
    """
    step = {Kind.SOLO: _solo, Kind.SYNC: _sync, Kind.LOCAL: _local}[plan.kind]
    tensors = step(state, mean, plan, layout, inner)
    if alone is not None and plan.kind is Kind.LOCAL and (plan.momentum, plan.lr, plan.fragments) == (0, 1, 1):
        _undo_rounding(tensors[ANCHOR].array, state.anchor, mean, alone)
    ledger = dict(state.ledger)
    for node, count in tokens.items():
        key = entry(node, plan.fragment)
        ledger[key] = ledger.get(key, 0) + count
    adam_step = state.adam_step + 1 if ADAM_M in tensors else 0
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger, adam_step)


def _undo_rounding(result: Vector, anchor: Vector, delta: Vector, weights: Vector) -> None:
    """θ in place of φ − Δ, which is rounded, where Δ = φ − θ."""
    for start in range(0, len(result), PIECE):
        part = slice(start, start + PIECE)
        np.copyto(result[part], weights[part], where=anchor[part] - weights[part] == delta[part])


def advance_pair(
    state: OuterState,
    number: int,
    members: Sequence[str],
    means: Sequence[Vector],
    ledger: Mapping[str, int],
    rates: NolocoSection,
) -> OuterState:
    """One member's state after round `number`, in which it met the other members, or nobody.

    Args:
        state: this member's own state.
        means: means of θ and, if the step needs it, of φ, shape [parameters] each; a member alone passes its own θ.
        ledger: tokens by site that the means contain.
    """
    anchor, momentum = SharedVector.scratch(len(means[0])), SharedVector.scratch(len(means[0]))
    mean_anchor = means[1] if len(means) > 1 else None
    noloco_step(state.anchor, state.momentum, means[0], mean_anchor, rates, anchor.array, momentum.array)
    return OuterState(number, tuple(sorted(members)), {ANCHOR: anchor, MOMENTUM: momentum}, dict(ledger))


def _solo(
    state: OuterState, mean: Vector, plan: RoundPlan, _layout: Layout, _inner: InnerSection
) -> dict[str, SharedVector]:
    """The anchor becomes the weights to the last bit; momentum warmup accumulates their movement."""
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
    """Take one inner step on the anchor itself. Over an interval, M accumulates φ_first − φ_last step by step."""
    import torch

    from pier_node.outer.inner_optimizer import step_vectors

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
    """Take Pier's (and DiLoCo's) outer step on one fragment; the other fragments stay unchanged."""
    length = len(state.anchor)
    part = plan.span(length)
    anchor, momentum = SharedVector.scratch(length), SharedVector.scratch(length)
    for rest in (slice(part.start), slice(part.stop, length)):
        anchor.array[rest], momentum.array[rest] = state.anchor[rest], state.momentum[rest]
    old, new = (state.anchor[part], state.momentum[part]), (anchor.array[part], momentum.array[part])
    outer_step(*old, mean, plan.momentum, plan.lr, *new)
    return {ANCHOR: anchor, MOMENTUM: momentum}

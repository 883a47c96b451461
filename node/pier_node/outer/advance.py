"""From one outer state to the next: apply a round's plan to the mean that its members agreed on.

Pure: equal states and equal means give equal bits at every member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import InnerSection, NolocoSection, RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.noloco import noloco_step
from pier_node.outer.pier import accumulate, outer_step, pseudo_gradient
from pier_node.outer.schedule import Kind, RoundPlan, entry
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState, Piece, in_pieces

Made = tuple[dict[str, SharedVector], dict[str, list[Piece]] | None]
"""The tensors of the next state, and what is known of their pieces, if they were measured."""


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
    made: Made
    match plan.kind:
        case Kind.SOLO:
            made = _solo(state, mean, plan)
        case Kind.SYNC:
            made = _sync(state, mean, plan, layout, inner), None
        case _:
            made = _local(state, mean, plan, alone)
    tensors, pieces = made
    ledger = dict(state.ledger)
    for node, count in tokens.items():
        key = entry(node, plan.fragment)
        ledger[key] = ledger.get(key, 0) + count
    adam_step = state.adam_step + 1 if ADAM_M in tensors else 0
    following = OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger, adam_step)
    return following.knowing(pieces) if pieces else following


def _in_pieces(tensors: Mapping[str, SharedVector], make: Callable[[slice], None]) -> dict[str, list[Piece]]:
    """Make tensors piece by piece; each is measured while it is in the cache."""

    def work(piece: slice) -> list[Piece]:
        make(piece)
        return [Piece.of(vector.array[piece]) for vector in tensors.values()]

    rows = in_pieces(work, len(tensors[ANCHOR].array))
    return dict(zip(tensors, map(list, zip(*rows, strict=True)), strict=True))


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


def _solo(state: OuterState, mean: Vector, plan: RoundPlan) -> Made:
    """The anchor becomes the weights to the last bit; momentum warmup accumulates their movement."""
    anchor, momentum = SharedVector.scratch(len(mean)), SharedVector.scratch(len(mean))

    def make(piece: slice) -> None:
        anchor.array[piece] = mean[piece]
        if plan.warmup:
            pseudo_gradient(state.anchor[piece], mean[piece], out=mean[piece])
            accumulate(state.momentum[piece], mean[piece], plan.momentum, out=momentum.array[piece])
        else:
            momentum.array[piece] = 0

    tensors = {ANCHOR: anchor, MOMENTUM: momentum}
    return tensors, _in_pieces(tensors, make)


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


def _local(state: OuterState, mean: Vector, plan: RoundPlan, alone: Vector | None) -> Made:
    """Take Pier's (and DiLoCo's) outer step on one fragment; the other fragments stay unchanged."""
    length = len(state.anchor)
    part = plan.span(length)
    anchor, momentum = SharedVector.scratch(length), SharedVector.scratch(length)
    exact = alone if (plan.momentum, plan.lr, plan.fragments) == (0, 1, 1) else None

    def make(piece: slice) -> None:
        if piece.start < part.start or piece.stop > part.stop:
            anchor.array[piece], momentum.array[piece] = state.anchor[piece], state.momentum[piece]
        here = slice(max(piece.start, part.start), min(piece.stop, part.stop))
        if here.start >= here.stop:
            return
        delta, new = mean[here.start - part.start : here.stop - part.start], anchor.array[here]
        outer_step(state.anchor[here], state.momentum[here], delta, plan.momentum, plan.lr, new, momentum.array[here])
        if exact is not None:
            _undo_rounding(new, state.anchor[here], delta, exact[here])

    tensors = {ANCHOR: anchor, MOMENTUM: momentum}
    return tensors, _in_pieces(tensors, make)


def _undo_rounding(result: Vector, anchor: Vector, delta: Vector, weights: Vector) -> None:
    """θ in place of φ − Δ, which is rounded, where Δ = φ − θ."""
    np.copyto(result, weights, where=anchor - weights == delta)

"""From one outer state to the next: apply a round's plan to the mean that its members agreed on.

Pure: equal states and equal means give equal bits at every member.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import SPARSE, InnerSection, NolocoSection, RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.noloco import noloco_step
from pier_node.outer.pier import accumulate, outer_step
from pier_node.outer.schedule import Kind, RoundPlan, entry
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState, Piece, in_pieces

Made = tuple[dict[str, SharedVector], dict[str, list[Piece]]]
"""The tensors of the next state, and what is known of their pieces."""


def get_ready(config: RunConfig) -> None:
    """Import what takes seconds and the run needs: otherwise the other sites would wait.

    That is PyTorch for synchronous rounds, and the loops of codecs, which are compiled in the first start on a machine.
    """
    if "sync" in (config.outer.algorithm, config.outer.start):
        import pier_node.outer.inner_optimizer
    codecs = {config.outer.codec, config.pipeline.activation_codec, config.pipeline.gradient_codec}
    if "int4" in codecs:
        import pier_node.outer.codec.int4_loops
    if codecs & {*SPARSE}:
        import pier_node.outer.codec.topk_loops  # noqa: F401
    gc.collect()
    gc.freeze()  # or each full collection would go through all imported modules, and stop the event loop for 0.1 s


def advance(
    state: OuterState,
    mean: SharedVector,
    tokens: Mapping[str, int],
    plan: RoundPlan,
    layout: Layout,
    inner: InnerSection,
    alone: Vector | None = None,
) -> OuterState:
    """The state after a round.

    Args:
        mean: mean over the members, for the fragment (or whole model) that the round syncs, shape [elements of the
            fragment]: the weights (solo), the gradient (sync) or the pseudo-gradient (local). Its memory becomes a part
            of the next state, or is overwritten.
        tokens: tokens that each member of the round trained on.
        alone: weights θ of the only member, shape [parameters]: if the outer step is the identity, the new anchor is θ
            to the last bit wherever the mean is φ − θ.
    """
    match plan.kind:
        case Kind.SOLO:
            tensors, pieces = _solo(state, mean, plan)
        case Kind.SYNC:
            tensors, pieces = _sync(state, mean, plan, layout, inner)
        case _:
            tensors, pieces = _local(state, mean, plan, alone)
    ledger = dict(state.ledger)
    for node, count in tokens.items():
        key = entry(node, plan.fragment)
        ledger[key] = ledger.get(key, 0) + count
    adam_step = state.adam_step + 1 if ADAM_M in tensors else 0
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger, adam_step).knowing(pieces)


def _in_pieces(
    tensors: Mapping[str, SharedVector], make: Callable[[slice], list[Piece] | None]
) -> dict[str, list[Piece]]:
    """Make tensors piece by piece; each is measured while it is in the cache, unless `make` says what it measures."""

    def work(piece: slice) -> list[Piece]:
        return make(piece) or [Piece.of(vector.array[piece]) for vector in tensors.values()]

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
        means: means of θ and, if the step needs it, of φ, shape [parameters] each; a member alone passes its own θ.
        ledger: tokens by site that the means contain.
    """
    anchor, momentum = SharedVector.scratch(len(means[0])), SharedVector.scratch(len(means[0]))
    mean_anchor = means[1] if len(means) > 1 else None
    noloco_step(state.anchor, state.momentum, means[0], mean_anchor, rates, anchor.array, momentum.array)
    return OuterState(number, tuple(sorted(members)), {ANCHOR: anchor, MOMENTUM: momentum}, dict(ledger))


def _solo(state: OuterState, weights: SharedVector, plan: RoundPlan) -> Made:
    """The anchor becomes the weights to the last bit; momentum warmup accumulates their movement."""
    momentum = SharedVector.scratch(len(weights.array))
    tensors = {ANCHOR: weights, MOMENTUM: momentum}
    return tensors, _in_pieces(tensors, lambda piece: _warm_up(state, weights.array, plan, momentum.array, piece))


def _warm_up(state: OuterState, anchor: Vector, plan: RoundPlan, momentum_out: Vector, piece: slice) -> None:
    """One piece of the momentum of a start, which accumulates the movement to the new anchor, if it is warmed up."""
    if plan.warmup:
        accumulate(state.momentum[piece], state.anchor[piece] - anchor[piece], plan.momentum, out=momentum_out[piece])
    else:
        momentum_out[piece] = 0


def _sync(state: OuterState, mean: SharedVector, plan: RoundPlan, layout: Layout, inner: InnerSection) -> Made:
    """Take one inner step on the anchor itself. Over an interval, M accumulates φ_first − φ_last step by step."""
    import torch

    from pier_node.outer.inner_optimizer import step_vectors

    names = (ANCHOR, ADAM_M, ADAM_V)
    tensors = {name: SharedVector.scratch(len(mean.array)) for name in names}
    for name in names:
        tensors[name].array[:] = state.tensors[name].array if name in state.tensors else 0
    anchor, adam_m, adam_v = (torch.from_numpy(tensors[name].array) for name in names)
    gradient = torch.from_numpy(mean.array)
    step_vectors(layout, anchor, (adam_m, adam_v, state.adam_step), gradient, plan.first_step, inner)
    tensors[MOMENTUM] = mean
    new = tensors[ANCHOR].array
    return tensors, _in_pieces(tensors, lambda piece: _warm_up(state, new, plan, mean.array, piece))


def _local(state: OuterState, mean: SharedVector, plan: RoundPlan, alone: Vector | None) -> Made:
    """Take Pier's (and DiLoCo's) outer step on one fragment; the other fragments stay unchanged, also their hashes."""
    length = len(state.anchor)
    part = plan.span(length)
    anchor, momentum = SharedVector.scratch(length), mean if plan.fragments == 1 else SharedVector.scratch(length)
    exact = alone if (plan.momentum, plan.lr, plan.fragments) == (0, 1, 1) else None
    _ = state.pieces  # measured by now, not by several threads at once

    def make(piece: slice) -> list[Piece] | None:
        if piece.start < part.start or piece.stop > part.stop:
            anchor.array[piece], momentum.array[piece] = state.anchor[piece], state.momentum[piece]
        here = slice(max(piece.start, part.start), min(piece.stop, part.stop))
        if here.start >= here.stop:
            return [state.piece(name, piece.start) for name in tensors]
        delta, new = mean.array[here.start - part.start : here.stop - part.start].copy(), anchor.array[here]
        outer_step(state.anchor[here], state.momentum[here], delta, plan.momentum, plan.lr, new, momentum.array[here])
        if exact is not None:
            # θ in place of φ − Δ, which is rounded, where Δ = φ − θ
            np.copyto(new, exact[here], where=state.anchor[here] - exact[here] == delta)
        return None

    tensors = {ANCHOR: anchor, MOMENTUM: momentum}
    return tensors, _in_pieces(tensors, make)

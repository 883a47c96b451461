"""A step of a stage: how it is taken, and how it is kept on disk so that it can be repeated after a crash.

A version of a stage has 12 or 16 bytes per parameter, and a site must keep one before each step counts. Most are kept
as a record, which has 4: the gradient, clipped as the step used it, the index of the step, and the version before. One
function takes a step the first time and repeats it, so the bits are the same. The record has a checksum of the
resulting weights, in case that the site comes back with another PyTorch or processor.

One of FULL_EVERY versions is kept in full. The records back to it stay while any of them may be needed, so the version
that counts can be read whether or not the next step will count. Each version is written under another name and then
renamed (rounds/state_store.py): what was written by half does not exist.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import InnerSection, RunConfig
from pier_node.outer.inner_optimizer import step_vectors
from pier_node.outer.layout import Layout
from pier_node.outer.pier import accumulate
from pier_node.outer.schedule import round_plan
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState, piece_hashes
from pier_node.pipeline.beginnings import MOMENTS
from pier_node.rounds.state_store import StateStore

NAMES = (ANCHOR, *MOMENTS)
GRADIENT = "gradient"
BEFORE, INDEX, CHECKSUM = "before", "index", "checksum"
"""Entries of a record's ledger: the version before, the index of the step, and a checksum of the resulting weights."""
FULL_EVERY = 8
"""With 8, a site writes 5 bytes per parameter and step on average, and its disk has 28 in records. With 16 these would
be 4.5 and 60."""

RECORDS = 4 * (FULL_EVERY - 1)
"""Bytes per parameter of the records since a version in full."""

log = logging.getLogger(__name__)


def clip(inner: InnerSection, gradient: Vector, square: float) -> SharedVector:
    """The gradient as a step uses it: clipped as part of the whole model's gradient.

    Args:
        gradient: mean over the microbatches, shape [parameters of the stage].
        square: square of the norm of the whole model's gradient.
    """
    factor = min(1.0, inner.clip_norm / (math.sqrt(square) + 1e-6)) if inner.clip_norm else 1.0
    clipped = SharedVector.scratch(len(gradient))
    np.multiply(gradient, np.float32(factor), out=clipped.array)
    return clipped


def take_stage_step(
    inner: InnerSection, layout: Layout, tensors: Mapping[str, Vector], adam_step: int, gradient: Vector, step: int
) -> None:
    """Take a step of the inner optimizer for one stage in place.

    Args:
        tensors: NAMES, shape [parameters of the stage] each.
        adam_step: number of steps behind the moments.
        gradient: clipped.
        step: index of the step in the whole run.
    """
    weights, first, second, flat = map(torch.from_numpy, (*(tensors[name] for name in NAMES), gradient))
    step_vectors(layout, weights, (first, second, adam_step), flat, step, inner.model_copy(update={"clip_norm": 0.0}))


def record_of(
    gradient: SharedVector, step: int, before: OuterState, version: int, ledger: Mapping[str, int]
) -> OuterState:
    """The record of a step that makes a version with this ledger.

    Args:
        gradient: clipped.
        step: index of the step in the whole run.
    """
    return OuterState(version, (), {GRADIENT: gradient}, {**ledger, BEFORE: before.round, INDEX: step})


def after_step(config: RunConfig, layout: Layout, before: OuterState, record: OuterState) -> OuterState:
    """The version that the step of a record makes; with a momentum if the one before has one. Blocks."""
    gradient, step = record.tensors[GRADIENT].array, record.ledger[INDEX]
    tensors = {name: SharedVector.scratch(len(gradient)) for name in NAMES}
    for name, vector in tensors.items():
        vector.array[:] = before.tensors[name].array if name in before.tensors else 0
    arrays = {name: vector.array for name, vector in tensors.items()}
    take_stage_step(config.inner, layout, arrays, before.adam_step, gradient, step)
    if MOMENTUM in before.tensors:
        tensors[MOMENTUM] = _warmed(config, before, arrays[ANCHOR], step)
    ledger = {name: it for name, it in record.ledger.items() if name not in (BEFORE, INDEX, CHECKSUM)}
    return OuterState(record.round, (), tensors, ledger, before.adam_step + 1)


def _warmed(config: RunConfig, before: OuterState, anchor: Vector, step: int) -> SharedVector:
    """M after a step of the warmup: over an interval it accumulates φ_first − φ_last (outer/advance.py)."""
    plan, momentum = round_plan(config, step + 1), SharedVector(len(anchor))
    if plan.warmup:
        accumulate(before.momentum, before.anchor - anchor, plan.momentum, out=momentum.array)
    return momentum


Repeat = Callable[[OuterState, OuterState], OuterState]
"""The version before and a record -> the version that results."""


class VersionStore:
    """Versions of a stage in a folder, some in full and others as records."""

    def __init__(self, folder: Path, run_hash: bytes, repeat: Repeat) -> None:
        self._disk, self._repeat = StateStore(folder, run_hash), repeat
        self.rounds, self.drop = self._disk.rounds, self._disk.drop

    def keep(self, state: OuterState, beside: int | None = None, record: OuterState | None = None) -> None:
        """Keep a version, so that it would survive a power cut. Blocks. Raises PierError.

        Args:
            beside: a version that can be read afterwards too, however many come after it.
            record: of the step that made the version. It is kept instead, if that is enough.
        """
        since = [] if beside is None else self._since_full(beside)
        if record and record.ledger[BEFORE] == beside and 0 < len(since) < FULL_EVERY:
            state = replace(record, ledger={**record.ledger, CHECKSUM: _checksum(state)})
        self._disk.keep(state, since)

    def keep_in_full(self, state: OuterState) -> None:
        """Keep a version that can be read without repeating steps. Blocks. Raises PierError."""
        self._disk.keep(state, self._disk.rounds())

    def of(self, version: int) -> OuterState | None:
        """A version, if it is here and undamaged. Repeats steps if it has to. Blocks. Raises PierError."""
        state: OuterState | None = None
        for it in reversed(self._since_full(version)):
            found = self._disk.of(it)
            if found and GRADIENT in found.tensors:
                found = self._repeated(state, found) if state else None
            state = found
        return state

    def _repeated(self, before: OuterState, record: OuterState) -> OuterState | None:
        state = self._repeat(before, record)
        if _checksum(state) == record.ledger[CHECKSUM]:
            return state
        log.error(
            "step %d, repeated from the disk, has other weights than before: if PyTorch or the processor has changed, "
            "start this site with the earlier one; otherwise the stage is fetched from a replica, if it has one, and "
            "what this site did apart from the others is lost",
            record.ledger[INDEX] + 1,
        )
        return None

    def _since_full(self, version: int) -> list[int]:
        """This version and those before it, back to one in full; empty: it cannot be read."""
        found: list[int] = []
        while (ledger := self._disk.ledger(version)) is not None:
            found.append(version)
            if BEFORE not in ledger:
                return found
            version = ledger[BEFORE]
        return []


def _checksum(state: OuterState) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(piece_hashes(state.anchor))).digest()[:6])

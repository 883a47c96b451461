"""Where a replica continues: from its checkpoint, from a later state that it kept, or from nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from simulation.keys import IDENTITIES
from simulation.statements import MemoryProofs

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.identity.node import Signer
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.statements import SignedStatements
from pier_node.site.resume import Resumed, Stores, resume

CONFIG = RunConfig.model_validate({"model": {"preset": "llama-tiny"}, "inner": {"total_steps": 100}})
LAYOUT = Layout.of(CONFIG.model)


class Roster:
    """Knows nobody."""

    def __init__(self) -> None:
        self.kept: tuple[str, ...] = ()

    async def settled(self) -> None:
        """At once."""

    def keep(self, members: tuple[str, ...]) -> None:
        self.kept = members


def site() -> Any:
    identity = next(iter(IDENTITIES.values()))
    statements = SignedStatements(Signer(identity, CONFIG.hash()))
    return SimpleNamespace(
        config=CONFIG,
        carrier=SimpleNamespace(node=identity.node),
        roster=Roster(),
        statements=statements,
        proofs=MemoryProofs(),
        progress=Progress(),
        record=SimpleNamespace(founder=True),
        settings=SimpleNamespace(weights=None),
    )


def state(round: int) -> OuterState:
    tensors = {name: SharedVector(LAYOUT.length) for name in (ANCHOR, MOMENTUM)}
    tensors[ANCHOR].array[:] = round
    return OuterState(round, ("a", "b"), tensors, {"a": 10 * round, "b": 10 * round})


async def resumed(folder: Path, joined: Any = None) -> Resumed:
    return await resume(joined or site(), LAYOUT, Stores.of(folder, CONFIG), None)


async def test_a_founder_begins_with_the_seed_and_the_next_start_finds_that(tmp_path: Path) -> None:
    joined = site()
    first = await resumed(tmp_path, joined)
    assert (first.how, first.state.round, joined.proofs.newest) == ("Starting", 0, 0)
    again = await resumed(tmp_path)
    assert again.state.digest == first.state.digest
    assert again.checkpoint.state.digest == first.state.digest


async def test_it_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    Stores.of(tmp_path, CONFIG).checkpoints.save(Checkpoint(state(3), inner_step=150, tokens=7))
    joined = site()
    found = await resumed(tmp_path, joined)
    assert (found.how, found.state.round, found.checkpoint.inner_step) == ("Resuming", 3, 150)
    assert joined.roster.kept == ("a", "b")


async def test_a_state_that_was_kept_after_the_checkpoint_counts(tmp_path: Path) -> None:
    stores = Stores.of(tmp_path, CONFIG)
    stores.checkpoints.save(Checkpoint(state(3), inner_step=150))
    stores.states.keep(state(4))
    found = await resumed(tmp_path)
    assert (found.checkpoint.state.round, found.state.round) == (3, 4)
    assert np.all(found.state.anchor == 4)


async def test_a_kept_state_is_enough(tmp_path: Path) -> None:
    Stores.of(tmp_path, CONFIG).states.keep(state(2))
    found = await resumed(tmp_path)
    assert (found.how, found.checkpoint.state.round, found.state.round) == ("Starting", 2, 2)

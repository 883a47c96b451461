from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rounds.cases import outer_state, shared

from pier_node.outer.state import OuterState
from pier_node.rounds.checkpoint import Checkpoint
from pier_node.rounds.folder import EVENTS_FILE
from pier_node.site.archive import Archive

RUN = bytes(32)


def archive(folder: Path, saved: list[int]) -> Archive:
    return Archive(
        folder, RUN, lambda state: saved.append(state.round), lambda: {"round": 7, "peers": [], "loss": np.nan}
    )


def at(round: int, moments: bool = True) -> Checkpoint:
    state: OuterState = outer_state(["a"], round=round, anchor=[1.0, 2.0])
    first, second = (shared([3.0, 4.0]), shared([5.0, 6.0])) if moments else (None, None)
    return Checkpoint(state, first, second, 9 * moments, 10, 100, None, ())


async def test_a_round_leaves_a_checkpoint_and_a_line(tmp_path: Path) -> None:
    saved: list[int] = []
    await archive(tmp_path, saved).commit(at(4))
    assert saved == [4]
    (line,) = (tmp_path / EVENTS_FILE).read_text().splitlines()
    event = json.loads(line)
    assert (event["round"], event["members"], event["loss"]) == (4, ["a"], None), "it is at round 7 already"
    assert event["digest"] == at(4).state.digest.hex()
    assert "peers" not in event
    again = await archive(tmp_path, saved).newest()
    assert again is not None
    assert (again.state.round, again.inner_step) == (4, 10)


async def test_a_kept_state_is_told_and_found_again(tmp_path: Path) -> None:
    saved: list[int] = []
    of = archive(tmp_path, saved)
    await of.commit(at(4))
    assert of.kept_after(4) is None
    assert [of.has(round) for round in (3, 4, 5)] == [False, True, False]
    await of.keep(at(5).state)
    kept = of.kept_after(4)
    assert kept is not None
    assert (saved, kept.round) == ([4, 5], 5)
    assert not (tmp_path / "checkpoints" / "round-00000005").exists()


def test_moments_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    of = archive(tmp_path, [])
    assert of.moments() is None
    assert not of.has(0)
    of.save(at(1, moments=False))
    assert of.moments() is None
    of.save(at(2))
    moments = of.moments()
    assert moments is not None
    assert (moments[0].tolist(), moments[1].tolist(), moments[2]) == ([3.0, 4.0], [5.0, 6.0], 9)

"""Steps that are kept as records are repeated to the bit after a start, wherever the power went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline.cases import config
from simulation.disk import Disk, PowerCut, under

from pier_node.base.durable import sync
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.inner_optimizer import step_vectors
from pier_node.outer.state import OuterState
from pier_node.pipeline.outer_step import MeanStep
from pier_node.pipeline.stage import stage_layout
from pier_node.pipeline.stage_state import StageState, disk_bytes
from pier_node.pipeline.stage_step import FULL_EVERY
from pier_node.pipeline.vote_state import VoteState, version
from pier_proto.v1.peer_pb2 import Total

TOTAL = Total(square=400.0)


def run(outer: dict[str, Any], optimizer: str = "adamw") -> RunConfig:
    tables = config().model_dump(mode="json") | {"outer": outer}
    tables["inner"] |= {"optimizer": optimizer, "total_steps": 40}
    return RunConfig.model_validate(tables)


TOGETHER = run({"algorithm": "sync"})
WARMUP = run({"algorithm": "pier", "start": "sync", "inner_steps": 5, "start_fraction": 0.8})
APART = run({"algorithm": "pier", "start": "none"})


class Site:
    """A site of stage 1 whose steps all count, unless a test says otherwise."""

    def __init__(self, folder: Path, run: RunConfig, apart: bool = False) -> None:
        self.folder, self.run, self.apart, self.steps = folder, run, apart, 0
        self.stage_state = StageState(folder, run)
        self.stage_state.hold(1)

    def keep(self, tag: int = 7, round: int = 0) -> int:
        """Take the next step and keep it. Returns its version."""
        name, length = version(round or self.steps + 1, tag), stage_layout(self.run.model, 4, 1).length
        gradient: Vector = np.random.default_rng([self.steps, tag]).standard_normal(length).astype(np.float32)
        if self.apart:
            self.stage_state.step_apart(gradient, TOTAL, self.steps, name, 2)
        else:
            self.stage_state.stepped(gradient, TOTAL, self.steps, name)
        return name

    def settle(self, name: int) -> None:
        self.steps += 1
        self.stage_state.settle(
            VoteState(self.steps, 3.0, (0, 0 if self.apart else name, 0, 0), counted=name), self.steps
        )

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.settle(self.keep())

    def restarted(self, name: int) -> OuterState | None:
        """What a site that starts in this folder continues from if a version counts; None: it must fetch it."""
        back = StageState(self.folder, self.run)
        if self.apart:
            back.own.resume(self.steps, name, self.steps)
            assert back.load(0)
            return back.done
        return back.state if back.load(name) else None


def bits(state: OuterState | None) -> Any:
    """All that a state consists of, but for its members."""
    assert state
    return state.round, state.adam_step, state.ledger, {name: it.array.tobytes() for name, it in state.tensors.items()}


@pytest.mark.parametrize(
    ("run", "apart"),
    [
        (TOGETHER, False),
        (WARMUP, False),
        (APART, True),
        *((run({"algorithm": "sync"}, it), False) for it in ("muon", "sgd")),
    ],
    ids=["together", "warmup", "apart", "muon", "sgd"],
)
def test_after_a_start_a_step_is_repeated_to_the_bit(tmp_path: Path, run: RunConfig, apart: bool) -> None:
    site = Site(tmp_path, run, apart)
    for _ in range(2 * FULL_EVERY + 2):
        site.take(1)
        working = site.stage_state.working
        assert bits(site.restarted(working.round)) == bits(working)


@pytest.mark.parametrize(
    ("run", "apart", "whole", "full", "mean"),
    [
        (TOGETHER, False, 12, [FULL_EVERY, 2 * FULL_EVERY], 5.0),
        (WARMUP, False, 16, [FULL_EVERY, 2 * FULL_EVERY], 5.5),
        (APART, True, 12, [1, FULL_EVERY + 1], 5.0),
    ],
    ids=["together", "warmup", "apart"],
)
def test_one_version_of_a_few_is_written_in_full(
    tmp_path: Path, run: RunConfig, apart: bool, whole: float, full: list[int], mean: float
) -> None:
    site, length, written = Site(tmp_path, run, apart), stage_layout(run.model, 4, 1).length, []
    for _ in range(2 * FULL_EVERY):
        site.take(1)
        file = next(tmp_path.glob(f"*/round-{site.stage_state.working.round:08d}/state.safetensors"))
        written.append(file.stat().st_size / length)
    assert [number for number, each in enumerate(written, 1) if each > 8] == full
    assert max(written) == pytest.approx(whole, rel=0.1)
    assert np.mean(written) == pytest.approx(mean, rel=0.1)
    kept = sum(path.parent.name == ("own" if apart else "stage-1") for path in tmp_path.glob("*/round-*"))
    assert kept <= FULL_EVERY + 1, "what nobody needs any more is removed"


def vector_bytes(folder: Path) -> int:
    """Bytes of vectors in a folder and below, without what describes them."""
    files = (*folder.glob("**/*.safetensors"),)
    return sum(file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little") for file in files)


def meet(site: Site, coded: bool, round: int) -> int:
    """Stage the outer step of a replica that is alone. Returns the version."""
    step, state, length = MeanStep(0.9, 0.7), site.stage_state.state, stage_layout(site.run.model, 4, 1).length
    assert state
    error = SharedVector(length) if coded else None
    site.stage_state.meet(step.after(state, step.brought(state.anchor, state.anchor, 1)), version(round, 7), error)
    return version(round, 7)


@pytest.mark.parametrize(
    ("run", "start", "most"),
    [
        (TOGETHER, 26, 76),
        (WARMUP, 16, 156),
        (APART, 0, 104),
        (run({"algorithm": "pier", "start": "none", "codec": "int4"}), 0, 116),
    ],
    ids=["together", "warmup", "apart", "coded"],
)
def test_the_disk_has_what_is_said_at_most(
    tmp_path: Path, run: RunConfig, start: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails: three attempts at each step and at each outer round."""
    site, length, seen, round, stage = Site(tmp_path, run), stage_layout(run.model, 4, 1).length, [0], 0, 0

    def measured(path: Path) -> None:
        sync(path)
        seen.append(vector_bytes(tmp_path))

    monkeypatch.setattr("pier_node.rounds.state_store.sync", measured)
    for number in range(1, 27):
        site.steps, site.apart = number, number > start
        meets = site.apart and (number - start) % 9 == 0
        for attempt in range(8 if meets else 4):
            round, counts = round + 1, attempt % 4 == 3
            name = meet(site, run.outer.codec != "none", round) if attempt >= 4 else site.keep(round=round)
            stage = name if counts and (attempt >= 4 or not site.apart) else stage
            voted = VoteState(number, 3.0, (0, stage, 0, 0), counted=name if counts else 0)
            site.stage_state.settle(voted, round)
    assert disk_bytes(run) == most
    assert 0.8 * most < max(seen) / length <= most


@pytest.mark.parametrize("how", ["lost", "torn", "done"])
@pytest.mark.parametrize("write", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [FULL_EVERY - 2, FULL_EVERY - 1, FULL_EVERY])
def test_what_counts_survives_a_power_cut_in_any_write_of_the_next_step(
    tmp_path: Path, steps: int, write: int, how: str
) -> None:
    site, disk = Site(tmp_path, TOGETHER), Disk(tmp_path, "")
    site.take(steps)
    counts, coming = site.stage_state.state, version(steps + 1, 7)
    with under(lambda: disk):
        disk.cut_in, disk.how = write, how
        with pytest.raises(PowerCut):
            site.keep()
    assert counts
    assert bits(site.restarted(counts.round)) == bits(counts)
    staged = site.restarted(coming)
    site.keep()  # after a start, if the step did not count
    site.settle(coming)
    assert staged is None or bits(staged) == bits(site.stage_state.state)
    site.take(FULL_EVERY)
    assert bits(site.restarted(site.stage_state.version)) == bits(site.stage_state.state)


def test_a_step_without_room_for_it_leaves_what_counts(tmp_path: Path) -> None:
    site, disk = Site(tmp_path, TOGETHER), Disk(tmp_path, "full")
    site.take(FULL_EVERY - 1)
    with under(lambda: disk), pytest.raises(Exception, match="No space left"):
        site.keep()
    assert bits(site.restarted(site.stage_state.version)) == bits(site.stage_state.state)


@pytest.mark.parametrize("steps", [3, FULL_EVERY - 1])
@pytest.mark.parametrize("apart", [False, True])
def test_what_counts_can_be_read_however_many_attempts_fail(tmp_path: Path, steps: int, apart: bool) -> None:
    site = Site(tmp_path, APART if apart else TOGETHER, apart)
    site.take(steps + apart)
    for tag in range(10, 15):
        site.keep(tag)
    assert bits(site.restarted(site.stage_state.working.round)) == bits(site.stage_state.working)


def test_an_outer_round_that_does_not_count_leaves_the_records_before_it(tmp_path: Path) -> None:
    site = Site(tmp_path, WARMUP)
    site.take(3)
    before = site.stage_state.state
    assert before
    step = MeanStep(0.9, 0.7)
    for tag in range(3):
        site.stage_state.meet(step.after(before, step.brought(before.anchor, before.anchor, 1)), version(4, tag), None)
    assert bits(site.restarted(before.round)) == bits(before)


def test_a_step_from_a_version_that_is_not_on_the_disk_is_kept_in_full(tmp_path: Path) -> None:
    site = Site(tmp_path, TOGETHER)
    site.take(2)
    site.stage_state.state = OuterState(version(2, 9), (), site.stage_state.working.tensors, {}, 2)
    name = site.keep()
    staged = site.restarted(name)
    assert staged is not None
    assert staged.adam_step == 3


def other_bits(layout: Any, weights: torch.Tensor, *rest: Any) -> None:
    """A step as another PyTorch might take it."""
    step_vectors(layout, weights, *rest)
    weights[5] = torch.nextafter(weights[5], torch.tensor(9.0))


def test_with_another_pytorch_a_step_with_other_bits_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, TOGETHER)
    site.take(3)
    monkeypatch.setattr("pier_node.pipeline.stage_step.step_vectors", other_bits)
    assert site.restarted(site.stage_state.version) is None
    assert "step 1, repeated from the disk, has other weights than before" in caplog.text
    monkeypatch.undo()
    assert bits(site.restarted(site.stage_state.version)) == bits(site.stage_state.state)


@pytest.mark.parametrize(("run", "apart"), [(TOGETHER, False), (APART, True)], ids=["together", "apart"])
def test_a_site_that_has_stopped_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunConfig, apart: bool
) -> None:
    """So it may be started with another PyTorch; and the step after the next start is kept as usual."""
    site = Site(tmp_path, run, apart)
    site.take(3)
    undecided = site.keep()
    site.stage_state.rest()
    monkeypatch.setattr("pier_node.pipeline.stage_step.after_step", None)
    working = site.stage_state.working
    assert bits(site.restarted(working.round)) == bits(working)
    monkeypatch.undo()
    site.settle(undecided)
    site.take(2)
    assert bits(site.restarted(site.stage_state.working.round)) == bits(site.stage_state.working)


def test_own_steps_that_cannot_be_repeated_are_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, APART, apart=True)
    site.take(3)
    monkeypatch.setattr("pier_node.pipeline.stage_step.step_vectors", other_bits)
    site.restarted(site.stage_state.working.round)
    assert [number in caplog.text for number in ("round 1, apart", "round 2, apart", "round 3, apart")] == [
        *(False, True, True)
    ]

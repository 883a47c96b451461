"""The loop of one site between a trainer and rounds that a test plays."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rounds.cases import config, outer_state, shared
from simulation.cluster import LENGTH
from simulation.training_cases import LOCAL, ME, Roster, Rounds, Site, begin, local
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Done, Progress
from pier_node.outer.mean import Update
from pier_node.outer.state import ADAM_M, ADAM_V, OuterState
from pier_node.rounds.catch_up import Fetched, Tries, Wanted
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.suspects import Behind
from pier_node.wire.carrier import PeerLost
from pier_proto.v1.peer_pb2 import Phase, Pulse


def test_a_run() -> None:
    site = Site(local(3), Rounds(begin()))
    site.run()
    assert [(job.first_step, job.steps, job.sequences, job.payload) for job in site.trainer.jobs] == [
        (0, 4, 8, "weights"),
        (4, 4, 8, "weights"),
        (8, 4, 8, "weights"),
    ]
    assert site.rounds.heard == [(4.0, 40)] * 3
    assert [job.start for job in site.trainer.jobs] == [100, 96, 92]
    assert site.training.progress.phase == Phase.PHASE_DONE
    assert (site.training.progress.inner_step, site.training.progress.tokens) == (12, 120)
    assert [checkpoint.state.round for checkpoint in site.saved] == [1, 2, 3]
    assert all(checkpoint.pending is None for checkpoint in site.saved)
    assert site.training.progress.validated_round == 3, "the last state at least is validated"


def test_the_first_exchange_waits_for_all_sites() -> None:
    run_config = config(run={"sites": 5}, inner={"total_steps": 8, "eval_every": 0}, **LOCAL)
    needed: list[int] = []
    rounds = Rounds(begin())
    site = Site(run_config, rounds)
    site.on_commit = lambda checkpoint: _note(needed, rounds.sites)
    site.run()
    assert needed == [5, 1]


async def _note(needed: list[int], sites: int) -> None:
    needed.append(sites)


def test_training_goes_on_while_a_result_is_on_its_way_to_the_disk_and_nothing_is_told_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pier_node.site.training.LARGE", 0)
    site = Site(local(2), Rounds(begin()))
    site.rounds.disk.clear()
    seen: list[Any] = []

    async def look() -> None:
        await asyncio.sleep(1.5)
        seen.extend([site.rounds.state.round, site.rounds.decided.round, site.trainer.jobs[1].start, len(site.saved)])
        await asyncio.sleep(5.0)
        seen.append(len(site.rounds.heard))
        site.rounds.disk.set()

    async def both() -> None:
        await asyncio.gather(site.work(), look())

    run(both())
    assert seen == [0, 1, 96.0, 0, 1], "its inner steps begin; its next update waits for the disk"
    assert [checkpoint.state.round for checkpoint in site.saved] == [1, 2]


def test_a_disk_that_fails_ends_the_site_though_it_trains_already() -> None:
    site = Site(local(3), Rounds(begin()))
    full = PierError("the disk is full")

    async def fail() -> bool:
        raise full

    site.rounds.disk.clear()
    site.rounds.disk.wait = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(PierError, match="full"):
        site.run()
    assert len(site.trainer.jobs) <= 2
    assert site.saved == []


def test_others_that_have_kept_a_result_sooner_are_not_ahead() -> None:
    site = Site(local(2), Rounds(begin()))
    site.rounds.disk.clear()
    site.roster.lead = [[], ["other"]]

    async def later() -> None:
        await asyncio.sleep(1.5)
        site.rounds.disk.set()

    async def both() -> None:
        await asyncio.gather(site.work(), later())

    run(both())
    assert [job.start for job in site.trainer.jobs] == [100, 96], "nothing was fetched"


# --- what no round took -------------------------------------------------------------------------


def caught_up_with(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> list[dict[str, Any]]:
    """Let fetch_state hand over these states, one after the other, or fail."""
    asked: list[dict[str, Any]] = []

    async def fetch(carrier: Any, peers: list[str], wanted: Wanted, tries: Tries, _: Any) -> Fetched:
        asked.append({"peers": peers, "tries": tries, **vars(wanted)})
        outcome = outcomes[len(asked) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome if isinstance(outcome, Fetched) else Fetched(outcome)

    monkeypatch.setattr("pier_node.rounds.catch_up.fetch_state", fetch)
    return asked


def later(round: int, level: float, **ledger: int) -> OuterState:
    return outer_state(["other"], round=round, anchor=[level] * LENGTH, **ledger)


AHEAD = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=1, inner_step=4, digest=b"d" * 32)}


def test_what_a_round_did_not_take_goes_into_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site continues from φ_new − Δ, and brings both parts to the next round."""
    asked = caught_up_with(monkeypatch, later(1, 50.0))
    site = Site(local(2), Rounds(begin(), Behind(["other"])), Roster([[], ["other"], ["other"]], AHEAD))
    site.run()
    assert [job.start for job in site.trainer.jobs] == [100.0, 50.0 - 4.0]
    assert site.rounds.heard == [(4.0, 40), (8.0, 80)]
    assert (asked[0]["peers"], asked[0]["round"]) == (["other"], 0), "the newest that it can prove"
    assert site.saved[-1].pending is None


@pytest.mark.parametrize("overlap", [False, True])
def test_who_has_caught_up_says_at_once_for_which_round_it_trains(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Its leader would not wait for a site that seems to train for a round that is over."""
    caught_up_with(monkeypatch, later(3, 50.0))
    roster = Roster([[], ["other"], ["other"], *[[]] * 9], AHEAD)
    site = Site(overlapping(6) if overlap else local(6), Rounds(begin(), Behind(["other"])), roster)
    told: list[tuple[int, int]] = []
    roster.on_tell = lambda: told.append((site.rounds.state.round, site.training.progress.training_for))
    site.run()
    assert told == [(3, 4)]


def test_what_is_in_the_new_state_already_is_not_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    caught_up_with(monkeypatch, later(1, 50.0, me=40))
    site = Site(local(2), Rounds(begin(), Behind(["other"])), Roster([[], ["other"], ["other"]], AHEAD))
    site.run()
    assert [job.start for job in site.trainer.jobs] == [100.0, 50.0]
    assert site.rounds.heard == [(4.0, 40), (4.0, 40)]


def test_a_round_that_was_finished_without_our_part_leaves_it_pending() -> None:
    site = Site(local(2), Rounds(begin(), "out"))
    site.run()
    assert [job.start for job in site.trainer.jobs] == [100.0, 96.0]
    assert site.rounds.heard == [(4.0, 40), (8.0, 80)]
    first = site.saved[0]
    assert first.pending is not None
    assert first.pending_tokens == (40,)


def test_nothing_is_lost_when_those_ahead_vanish_before_they_gave_us_anything() -> None:
    site = Site(local(1), Rounds(begin(), Behind(["other"])), Roster([[], []]))
    site.run()
    assert [job.start for job in site.trainer.jobs] == [100.0]
    assert site.rounds.heard == [(4.0, 40), (4.0, 40)], "what an undecided round may take of ours is all that we have"


def test_a_failed_transfer_is_tried_again_with_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = caught_up_with(monkeypatch, PeerLost("other", "cut"), later(1, 50.0))
    site = Site(local(2), Rounds(begin()), Roster([["other"]] * 4, AHEAD))
    site.run()
    assert len(asked) == 2
    assert asked[0]["tries"] is asked[1]["tries"]
    assert [job.first_step for job in site.trainer.jobs] == [4]


def test_a_checkpoint_keeps_what_no_round_took() -> None:
    site = Site(local(2), Rounds(begin(), "out", asyncio.CancelledError()))
    with pytest.raises(asyncio.CancelledError):
        site.run()
    snapshot = site.training.snapshot()
    assert snapshot.pending is not None
    assert (snapshot.pending.array[0], snapshot.pending_tokens) == (8.0, (80,))
    again = Site(local(2), Rounds(snapshot.state))
    again.training.restore(snapshot)
    again.run()
    assert again.trainer.jobs == [], "the steps of its round are done"
    assert again.rounds.heard == [(8.0, 80)]
    assert again.training.progress.tokens == 80


# --- overlap and fragments -------------------------------------------------------------------------


def overlapping(rounds: int) -> RunConfig:
    return config(inner={"total_steps": 4 * rounds, "eval_every": 0}, **{**LOCAL, "overlap": True})


def test_a_stop_while_a_checkpoint_is_saved_loses_nothing() -> None:
    site = Site(local(2), Rounds(begin()))
    saved: list[int] = []

    async def scene() -> None:
        work = asyncio.create_task(site.work())

        async def save(checkpoint: Checkpoint) -> None:
            await asyncio.sleep(1.0)
            work.cancel()  # its next inner steps are done by now
            await asyncio.sleep(1.0)
            saved.append(checkpoint.state.round)

        site.on_commit = save
        with pytest.raises(asyncio.CancelledError):
            await work

    run(scene())
    last = site.training.snapshot()
    assert site.training.resting
    assert saved == [1]
    assert (last.state.round, last.state.ledger[ME], last.tokens, last.pending_tokens) == (1, 40, 80, (40,))


def test_a_stop_while_a_round_waits_for_others_keeps_the_inner_steps_done_meanwhile() -> None:
    site = Site(overlapping(3), Rounds(begin()))

    async def wait(_update: Update, _advance: Callable[..., OuterState], _sites: int = 1) -> OuterState:
        return await asyncio.Future()

    site.rounds.commit = wait  # type: ignore[method-assign, assignment]

    async def scene() -> None:
        work = asyncio.create_task(site.work())
        await asyncio.sleep(5.0)  # two rounds' inner steps take 2 s
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(scene())
    last = site.training.snapshot()
    assert (last.inner_step, last.tokens, last.pending_tokens) == (8, 80, (80,))


def test_the_next_inner_steps_are_done_while_a_checkpoint_is_saved() -> None:
    site = Site(local(3), Rounds(begin(), "out"))
    seen: list[tuple[int, int, bool]] = []

    async def save(checkpoint: Checkpoint) -> None:
        before = {*checkpoint.pending.array} if checkpoint.pending else None
        await asyncio.sleep(1.0)
        after = {*checkpoint.pending.array} if checkpoint.pending else None
        seen.append((checkpoint.state.round, len(site.trainer.jobs), before == after))

    site.on_commit = save
    site.run()
    assert seen == [(1, 2, True), (2, 3, True), (3, 3, True)]


def test_a_checkpoint_that_cannot_be_saved_ends_the_site_and_keeps_its_steps() -> None:
    site = Site(local(3), Rounds(begin()))

    async def fail(_checkpoint: Checkpoint) -> None:
        raise PierError("the disk is full")

    site.on_commit = fail
    with pytest.raises(PierError, match="disk is full"):
        site.run()
    last = site.training.snapshot()
    assert (last.state.round, last.tokens, last.pending_tokens) == (1, 80, (40,))


def test_a_stop_during_inner_steps_leaves_nothing_to_be_saved() -> None:
    site = Site(local(2), Rounds(begin()))

    async def stop(**_job: Any) -> None:
        raise asyncio.CancelledError

    site.trainer.run = stop  # type: ignore[method-assign, assignment]
    with pytest.raises(asyncio.CancelledError):
        site.run()
    assert not site.training.resting


def test_with_overlap_a_result_is_loaded_one_interval_later() -> None:
    """From φ = 100 with η = 1: the second interval continues from the first one's end, and every step counts once."""
    site = Site(overlapping(3), Rounds(begin()))
    site.run()
    assert [job.start for job in site.trainer.jobs] == [100.0, 96.0, 92.0]
    assert site.rounds.heard == [(4.0, 40)] * 3
    assert site.rounds.state.anchor[0] == 88.0
    saved = [(it.state.round, it.inner_step, it.pending_tokens) for it in site.saved]
    assert saved == [(1, 8, (40,)), (2, 12, (40,)), (3, 12, ())]


def early(rounds: int, state: OuterState | None = None) -> Site:
    """With overlap, and a trainer that stops after one step when a result is there."""
    state = state or outer_state([ME, "other"], anchor=[100.0] * LENGTH)
    site = Site(overlapping(rounds), Rounds(state), Roster(said={"other": Pulse()}))
    site.trainer.stops_after = 1
    return site


def test_a_result_that_is_there_is_taken_and_the_rest_of_the_steps_begin_from_it() -> None:
    """From φ = 100 with η = 1: a step from 96, which is kept on top of the result, 96; then three more."""
    site = early(3)
    site.run()
    assert [(job.first_step, job.steps, job.start) for job in site.trainer.jobs] == [
        (0, 4, 100.0),
        (4, 4, 96.0),
        (5, 3, 95.0),
        (8, 4, 92.0),
        (9, 3, 91.0),
    ]
    assert site.rounds.heard == [(4.0, 40)] * 3
    assert site.rounds.state.anchor[0] == 88.0
    saved = [(it.state.round, it.inner_step, it.pending_tokens) for it in site.saved]
    assert saved == [(1, 5, (10,)), (2, 9, (10,)), (3, 12, ())]


def test_steps_that_end_early_do_not_make_a_site_slow() -> None:
    """They are too few to say how fast it is, and the rest of them would be cut by that."""
    site = early(3)
    site.training.progress.tokens_per_second = 100.0
    run_steps = site.trainer.run

    async def slow(first_step: int, steps: int, on_progress: Callable[[Progress], None], **job: Any) -> Done:
        done = await run_steps(first_step, steps, on_progress=on_progress, **job)
        on_progress(Progress(first_step, 1.0, 10, 1.0 if done.steps < steps else 0.1))
        return done

    site.trainer.run = slow  # type: ignore[method-assign, assignment]
    site.roster.said = {"other": Pulse(tokens_per_second=100.0)}
    site.run()
    assert [job.steps for job in site.trainer.jobs] == [4, 4, 3, 4, 3]


def test_alone_nothing_arrives_early() -> None:
    site = early(3)
    site.roster.said = {}
    site.run()
    assert [job.steps for job in site.trainer.jobs] == [4, 4, 4]


def test_a_result_that_comes_late_waits_for_the_end_of_the_steps() -> None:
    site = early(3)
    run_steps = site.trainer.run

    async def half(first_step: int, steps: int, on_progress: Callable[[Progress], None], **job: Any) -> Done:
        on_progress(Progress(first_step + steps // 2 - 1, 1.0, 20, 0.5))
        return await run_steps(first_step, steps, on_progress=on_progress, **job)

    site.trainer.run = half  # type: ignore[method-assign, assignment]
    site.run()
    assert [(job.first_step, job.steps) for job in site.trainer.jobs] == [(0, 4), (4, 4), (8, 4)]


def test_a_site_goes_on_with_the_rest_of_its_steps_after_a_restart() -> None:
    straight, broken = early(4), early(4)
    straight.run()
    broken.run()
    again = early(4, broken.rounds.committed[1])
    again.training.restore(replace(broken.saved[1], pending=shared([1.0] * LENGTH)))  # as it was when it was taken
    again.run()
    assert [job.start for job in again.trainer.jobs] == [job.start for job in straight.trainer.jobs[4:]]
    assert again.rounds.state.digest == straight.rounds.state.digest


def test_a_site_whose_rest_of_steps_was_taken_before_it_crashed_begins_from_the_result() -> None:
    broken = early(4)
    broken.run()
    again = early(4, broken.rounds.committed[2])
    again.training.restore(replace(broken.saved[1], pending=shared([1.0] * LENGTH)))
    again.run()
    assert [(job.first_step, job.start) for job in again.trainer.jobs] == [(12, 88.0)]
    assert again.rounds.state.anchor[0] == 84.0


def test_a_checkpoint_that_was_taken_during_a_flight_goes_on_with_the_same_steps() -> None:
    straight, broken = (Site(overlapping(4), Rounds(begin())) for _ in range(2))
    straight.run()
    broken.run()
    second = replace(broken.saved[1], pending=shared([4.0] * LENGTH))  # as it was when it was taken
    again = Site(overlapping(4), Rounds(broken.rounds.committed[2]))
    again.training.restore(second)
    again.run()
    assert [job.start for job in again.trainer.jobs] == [job.start for job in straight.trainer.jobs[3:]]
    assert again.rounds.heard == straight.rounds.heard[3:], "the third round was committed before the crash"
    assert again.rounds.state.digest == straight.rounds.state.digest


def test_a_site_that_ends_before_its_first_steps_saves_no_update_beside_the_state_that_took_it() -> None:
    """As when its workers cannot start: its next start would bring the update once more."""
    broken = Site(overlapping(4), Rounds(begin()))
    broken.run()
    second = replace(broken.saved[1], pending=shared([4.0] * LENGTH))  # as it was when it was taken
    again = Site(overlapping(4), Rounds(broken.rounds.committed[2]))
    again.training.restore(second)
    assert not again.training.resting
    run(again.training.close())
    last = again.training.snapshot()
    assert (again.training.resting, last.state.round, last.pending_tokens) == (True, 3, ())


def test_with_fragments_each_part_is_brought_at_its_own_time() -> None:
    parts = config(inner={"total_steps": 8, "eval_every": 0}, **{**LOCAL, "fragments": 2})
    site = Site(parts, Rounds(begin()))
    site.run()
    assert site.rounds.heard == [(2.0, 20), (4.0, 40), (4.0, 40), (4.0, 40), (2.0, 20)]
    assert [job.steps for job in site.trainer.jobs] == [2, 2, 2, 2], "the last round has no steps left"
    assert site.rounds.state.anchor.tolist() == [92.0] * LENGTH
    assert site.rounds.state.ledger == {"me": 80, "me/1": 80, "other": 3, "other/1": 2}


def test_what_a_codec_drops_is_brought_again() -> None:
    lossy = config(inner={"total_steps": 8, "eval_every": 0}, **{**LOCAL, "codec": "int8"})
    rounds = Rounds(begin())
    rounds.drops = 1.0
    site = Site(lossy, rounds)
    site.run()
    assert rounds.heard == [(4.0, 40), (5.0, 40)]
    assert site.saved[-1].residual is not None
    assert site.saved[-1].residual.array.tolist() == [1.0] * LENGTH


@pytest.mark.parametrize("lost", [1, 2])
def test_what_a_codec_dropped_is_not_brought_twice_after_a_crash(lost: int) -> None:
    """The residual in a checkpoint went with the next update: rounds since then have it already."""
    lossy = config(inner={"total_steps": 16, "eval_every": 0}, **{**LOCAL, "codec": "int8"})
    rounds = Rounds(begin())
    rounds.drops = 1.0
    broken = Site(lossy, rounds)
    broken.run()
    again = Site(lossy, Rounds(rounds.committed[lost]))
    checkpoint = replace(broken.saved[0], residual=shared([1.0] * LENGTH))  # as it was when it was taken
    again.training.restore(checkpoint)
    again.run()
    assert rounds.heard[1:] == [(5.0, 40)] * 3
    assert again.rounds.heard[0] == (4.0, 40)


# --- training that went astray ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("lands", [math.nan, math.inf, 1e30])
def test_an_update_that_others_would_refuse_contributes_nothing(lands: float) -> None:
    site = Site(local(2), Rounds(begin()))
    site.trainer.lands = lands

    async def heal(checkpoint: Checkpoint) -> None:
        site.trainer.lands = None

    site.on_commit = heal
    site.run()
    assert site.rounds.heard == [(0.0, 0), (4.0, 40)]
    second = site.trainer.jobs[1]
    assert (second.start, second.adam_step, second.adam_m) == (100.0, 0, 0.0), "and its moments are forgotten"


def test_with_overlap_a_checkpoint_has_no_tokens_of_steps_that_are_forgotten() -> None:
    """Or its site, killed and back, would bring nothing with their weight to its next round."""
    site = Site(overlapping(3), Rounds(begin()))
    run_steps, saved = site.trainer.run, list[tuple[int, tuple[int, ...], int]]()

    async def astray(first_step: int, *args: Any, **job: Any) -> Done:
        site.trainer.lands = math.nan if first_step == 4 else None
        return await run_steps(first_step, *args, **job)

    async def save(checkpoint: Checkpoint) -> None:
        saved.append((checkpoint.state.round, checkpoint.pending_tokens, checkpoint.adam_step))

    site.trainer.run, site.on_commit = astray, save  # type: ignore[method-assign]
    site.run()
    assert saved[0] == (1, (), 0)


@pytest.mark.parametrize(("lands", "said"), [(100.0, True), (99.0, False)])
def test_steps_that_change_no_weight_are_said(lands: float, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As when a program replaces the parameters that it gave to `pier.join`; training begins at 100."""
    site = Site(local(1), Rounds(begin()))
    site.trainer.lands = lands
    site.run()
    assert ("40 tokens have changed no weight" in caplog.text) == said


def test_a_solo_start_that_diverged_stops_the_run() -> None:
    site = Site(config(inner={"total_steps": 40}, inner_steps=4), Rounds(begin()))
    site.trainer.lands = math.nan
    with pytest.raises(PierError, match="diverged"):
        site.run()
    assert site.rounds.state.round == 0


# --- starts ----------------------------------------------------------------------------------


def test_a_solo_start_trains_with_everybodys_batch_and_brings_its_weights() -> None:
    run_config = config(run={"sites": 3}, inner={"total_steps": 40, "eval_every": 0}, inner_steps=4)
    site = Site(run_config, Rounds(begin(), "in", asyncio.CancelledError()))
    with pytest.raises(asyncio.CancelledError):
        site.run()
    assert [job.sequences for job in site.trainer.jobs] == [24, 8]
    assert site.rounds.heard[0] == (96.0, 40)
    assert site.rounds.state.anchor[0] == 96.0
    assert site.rounds.state.momentum[0] == 4.0


def test_workers_get_the_moments_of_a_synchronous_start_at_its_end() -> None:
    run_config = config(inner={"total_steps": 20, "eval_every": 0}, inner_steps=2, start="sync")
    site = Site(run_config, SyncRounds(begin()))
    site.run()
    jobs = site.trainer.jobs
    assert [(job.payload, job.steps) for job in jobs[:3]] == [("gradient", 1), ("gradient", 1), ("weights", 2)]
    assert (jobs[2].adam_step, jobs[2].adam_m) == (2, 0.5), "those of the state, not what the workers had"
    assert jobs[3].adam_step is None, "from then on they keep their own"
    assert site.saved[0].adam_m is None, "the state has them"
    assert site.saved[2].adam_m is site.trainer.adam_m
    assert site.rounds.heard[0] == (99.0, 10), "the gradient as it is, not its distance from the anchor"


class SyncRounds(Rounds):
    """Its first two rounds are synchronous ones."""

    async def commit(self, update: Update, advance: Callable[..., OuterState], sites: int = 1) -> OuterState:
        if self.state.round >= 2:
            return await super().commit(update, advance, sites)
        self.heard.append((float(update.sent()[0]), update.tokens))
        moments = {name: shared(np.full(LENGTH, 0.5, np.float32)) for name in (ADAM_M, ADAM_V)}
        tensors = {**self.state.tensors, **moments}
        number = self.state.round + 1
        self.state = self.decided = OuterState(number, (ME,), tensors, {ME: 10 * number}, adam_step=number)
        return self.state


# --- joining in the middle ------------------------------------------------------------------------


@pytest.mark.parametrize(("inner_step", "left"), [(4, 4), (5, 3), (7, 1), (8, 0), (20, 0), (0, 4)])
def test_a_site_that_has_just_caught_up_does_the_steps_that_are_left(
    monkeypatch: pytest.MonkeyPatch, inner_step: int, left: int
) -> None:
    """So that it is ready when the furthest of the others is."""
    caught_up_with(monkeypatch, later(1, 50.0))
    others = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=1, inner_step=inner_step)}
    site = Site(local(3), Rounds(begin()), Roster([["other"], ["other"]], others))
    site.run()
    jobs = [(job.first_step, job.steps) for job in site.trainer.jobs]
    assert jobs == ([(8 - left, left)] if left else []) + [(8, 4)]
    assert site.rounds.heard[0] == (float(left), 10 * left)


def test_another_that_says_it_holds_other_bits_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    others = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=1, digest=b"!" * 32)}
    site = Site(local(2), Rounds(begin(), "out"), Roster(said=others))
    site.run()
    assert site.rounds.state.round == 2
    assert [it.getMessage()[:31] for it in caplog.records if it.levelname == "ERROR"] == [
        "round 1: other says that its st"
    ]

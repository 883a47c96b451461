"""A site in pairs, between a trainer that counts and pairs that a test plays; and what others say of their bits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rounds.cases import config, outer_state
from simulation.cluster import LENGTH, TinyLayout
from simulation.statements import PlainStatements
from simulation.training_cases import ME, Carrier, Roster, Trainer, begin
from simulation.virtual_time import run

from pier_node.config.run import RunConfig
from pier_node.gossip.standing import Standing
from pier_node.outer.advance import advance_pair
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.outer.times import Times
from pier_node.rounds.catch_up import Fetched
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.site.agreement import InPairs, OfAll, Peers
from pier_node.site.loop import Orders, run_work
from pier_node.site.training import Training
from pier_proto.v1.peer_pb2 import Phase, Pulse


class Pairs:
    """Takes every step alone with α = 0, β = 1: the anchor becomes what is brought; or the round it is told to take."""

    def __init__(self, state: OuterState, skips: dict[int, int] | None = None) -> None:
        self.state, self.sites, self.spread, self.saved = state, 0, 0.25, state.round
        self.skips = skips or {}
        self.follow: list[list[str]] = []
        self.heard: list[tuple[int, float, int]] = []
        self.order: list[str] = []
        self.resolved, self.times = 0, Times()
        self.standing: Standing | None = None

    def coming(self) -> int:
        return self.skips.get(self.state.round, self.state.round + 1)

    def sources(self) -> list[str]:
        return self.follow.pop(0) if self.follow else []

    async def resolve(self) -> None:
        self.resolved += 1

    async def commit(
        self, number: int, update: Update, saved: Callable[[], Awaitable[None]], sites: int = 1
    ) -> OuterState:
        self.sites = sites
        self.heard.append((number, float(update.vector[0]), update.tokens))
        ledger = {**self.state.ledger, ME: self.state.ledger.get(ME, 0) + update.tokens}
        rates = RATES.outer.noloco
        self.state = advance_pair(self.state, number, [ME], [update.vector], ledger, rates)
        await saved()
        self.order.append(f"answered {number}")
        return self.state

    async def adopt(self, state: OuterState) -> None:
        self.state = state

    @property
    def decided(self) -> OuterState:
        return self.state

    async def until_decided(self, round: int, work: asyncio.Task[bool]) -> None:
        await asyncio.wait([work])


NOLOCO: dict[str, Any] = {"algorithm": "noloco", "inner_steps": 4, "noloco": {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}}
RATES = config(**NOLOCO)


def local(rounds: int, **run_section: Any) -> RunConfig:
    return config(run=run_section, inner={"total_steps": 4 * rounds, "eval_every": 0}, **NOLOCO)


class Site:
    def __init__(self, run_config: RunConfig, pairs: Pairs, roster: Roster | None = None) -> None:
        self.pairs, self.trainer, self.saved = pairs, Trainer(), list[Checkpoint]()
        layout: Any = TinyLayout()
        carrier: Any = Carrier()
        crowd: Any = roster or Roster()
        self.roster = crowd
        played: Any = pairs
        progress, peers = Progress(), Peers(carrier, crowd, LENGTH)
        pairs.standing = Standing(crowd, "", PlainStatements(ME))
        agreement = InPairs(played, peers, progress, self.keep, None)
        self.on_commit: Callable[[Checkpoint], Awaitable[None]] = self.save
        self.training = Training(run_config, layout, agreement, self.trainer, progress, self._committed)

    async def _committed(self, checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
        await kept
        await self.on_commit(checkpoint)

    async def keep(self, state: OuterState) -> None:
        self.pairs.order.append(f"kept {state.round}")

    async def save(self, checkpoint: Checkpoint) -> None:
        self.pairs.order.append(f"saved {checkpoint.state.round}")
        self.saved.append(checkpoint)

    def run(self) -> None:
        run(run_work(self.training, self.roster, Orders()))


def test_a_run() -> None:
    site = Site(local(3), Pairs(begin()))
    site.run()
    assert site.pairs.heard == [(1, 96.0, 40), (2, 92.0, 40), (3, 88.0, 40)], "θ itself travels"
    assert [job.start for job in site.trainer.jobs] == [100, 96, 92]
    assert [checkpoint.state.round for checkpoint in site.saved] == [1, 2, 3]
    assert site.pairs.resolved == 3, "before each meeting"
    progress = site.training.progress
    assert (progress.phase, progress.inner_step, progress.spread) == (Phase.PHASE_DONE, 12, 0.25)
    assert progress.validation_loss == 88.0


def test_a_step_is_kept_before_the_partner_is_answered() -> None:
    site = Site(local(2), Pairs(begin()))
    site.run()
    assert site.pairs.order == ["kept 1", "answered 1", "saved 1", "kept 2", "answered 2", "saved 2"]
    assert all(checkpoint.pending is None for checkpoint in site.saved), "what was brought is in it"
    assert [checkpoint.state.ledger for checkpoint in site.saved] == [{ME: 40}, {ME: 80}]


def test_the_first_round_waits_for_all_sites() -> None:
    site = Site(local(2, sites=5), Pairs(begin()))
    sites: list[int] = []
    site.on_commit = lambda checkpoint: _note(sites, site.pairs.sites)
    site.run()
    assert sites == [5, 1]


async def _note(sites: list[int], count: int) -> None:
    sites.append(count)


@pytest.mark.parametrize(
    ("lags", "warnings"),
    [([0, 0], 0), ([9], 0), ([9, 4, 1, 0], 0), ([3, 3], 1), ([3, 4, 4], 2), ([2, 0, 2], 0)],
    ids=str,
)
def test_a_line_on_which_states_are_out_of_date_again_and_again_is_told(
    lags: list[int], warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not told while each state that was fetched is nearer to the others' than the one before."""

    class All:
        state = begin()

        def sources(self) -> list[str]:
            return ["other"]

        def trust(self) -> None: ...

        async def adopt(self, state: OuterState, _proof: object) -> None:
            self.state = state

    async def fetched(_sources: object, fetch: Callable[[list[str]], Awaitable[Fetched]]) -> Fetched:
        return Fetched(outer_state(["other"], round=rounds.state.round + 10))

    async def main() -> None:
        for lag in lags:
            front = rounds.state.round + 10 + lag
            roster.lead = [["other"]] if lag else [[]]
            roster.said = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=front)}
            await agreement.fetch()

    monkeypatch.setattr("pier_node.rounds.catch_up.persist", fetched)
    carrier: Any = Carrier()
    rounds: Any = All()
    roster: Any = Roster()
    agreement = OfAll(rounds, Peers(carrier, roster, LENGTH))
    run(main())
    assert len([it for it in caplog.messages if "if this goes on" in it]) == warnings


@pytest.mark.parametrize(("inner_step", "left"), [(12, 4), (14, 2), (16, 0), (0, 4)])
def test_an_overtaken_site_does_the_steps_that_those_in_front_have_left(inner_step: int, left: int) -> None:
    """It has taken round 1, and joins them in round 4: inner steps 12 to 16."""
    others = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=3, inner_step=inner_step)}
    site = Site(local(5), Pairs(begin(), skips={1: 4}), Roster(said=others))
    site.run()
    jobs = [(job.first_step, job.steps) for job in site.trainer.jobs]
    assert jobs == [(0, 4), *([(16 - left, left)] if left else []), (16, 4)]
    assert [number for number, _, _ in site.pairs.heard] == [1, 4, 5]


@pytest.mark.filterwarnings("ignore:overflow")
def test_training_that_went_astray_brings_the_anchor() -> None:
    site = Site(local(2), Pairs(begin()))
    site.trainer.lands = math.nan

    async def heal(checkpoint: Checkpoint) -> None:
        site.trainer.lands = None

    site.on_commit = heal
    site.run()
    assert site.pairs.heard == [(1, 100.0, 0), (2, 96.0, 40)]
    assert (site.trainer.jobs[1].adam_step, site.trainer.jobs[1].adam_m) == (0, 0.0)


def test_another_state_is_taken_when_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    async def fetch(carrier: Any, peers: list[str], *_: Any) -> Fetched:
        asked.append(peers)
        return Fetched(outer_state(["other"], round=2, anchor=[50.0] * LENGTH))

    monkeypatch.setattr("pier_node.gossip.catch_up.fetch_state", fetch)
    pulses = {"other": Pulse(phase=Phase.PHASE_TRAINING, round=2, digest=b"d" * 32, inner_step=8)}
    site = Site(local(3), Pairs(begin()), Roster(said=pulses))
    site.pairs.follow = [["other"], ["other"]]
    site.run()
    assert asked == [["other", "other"]], "and whoever has the same state"
    assert [job.start for job in site.trainer.jobs] == [50.0]
    assert site.pairs.heard == [(3, 46.0, 40)]


def test_a_solo_start_is_made_as_with_other_algorithms() -> None:
    run_config = config(
        run={"sites": 2}, inner={"total_steps": 40, "eval_every": 0}, start="solo", start_fraction=0.1, **NOLOCO
    )
    site = Site(run_config, Solo(begin()))
    site.run()
    assert [job.sequences for job in site.trainer.jobs[:2]] == [16, 8]
    assert site.saved[0].state.anchor[0] == 96.0
    assert len(site.saved) == 10


class Solo(Pairs):
    async def commit_alone(self, update: Update, advance: Callable[..., OuterState]) -> OuterState:
        self.state = advance(self.state, update.copied(), {ME: update.tokens})
        return self.state


# --- bits that differ ------------------------------------------------------------------------------


STATE = outer_state(["a", "me", "z"], round=3)
OTHER = b"?" * 32


def report(*nodes: str, round: int = 3, digest: bytes = OTHER) -> None:
    roster: Any = Roster(said={node: Pulse(round=round, digest=digest) for node in nodes})
    carrier: Any = Carrier()
    rounds: Any = Pairs(STATE)
    OfAll(rounds, Peers(carrier, roster, LENGTH)).compare(STATE)


def test_equal_bits_and_other_rounds_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    report("a", "z", digest=STATE.digest)
    report("a", "z", round=2)
    report("a", "z", round=4)
    assert not caplog.records


@pytest.mark.parametrize("nodes", ["z", "az", "bcdefg"])
def test_what_others_say_of_their_bits_is_an_error_once_each_and_stops_nobody(
    nodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when most of the round's members say so: a liar could stop the other site of a run of two."""
    report(*nodes)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * len(nodes)
    for node, record in zip(nodes, caplog.records, strict=True):
        assert f"round 3: {node} says that its state differs" in record.getMessage()
        assert STATE.digest.hex()[:12] in record.getMessage()


# --- who counts ------------------------------------------------------------------------------------


def test_what_strangers_claim_slows_nobody_down() -> None:
    said = {node: Pulse(phase=Phase.PHASE_TRAINING, round=3, tokens_per_second=1e12) for node in ("a", "stranger")}
    roster: Any = Roster(said=said)
    carrier: Any = Carrier()
    rounds: Any = Pairs(STATE)
    assert OfAll(rounds, Peers(carrier, roster, LENGTH)).others() == [said["a"]]
    rounds.standing = Standing(roster, "a", PlainStatements(ME))
    peers = Peers(carrier, roster, LENGTH)
    pairs = InPairs(rounds, peers, Progress(), rounds.adopt, None)

    async def main() -> None:
        assert pairs.others() == [said["a"]], "the founder"

    run(main())

"""What a site says of itself agrees with where it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from simulation.cluster import Disk
from simulation.network import Network, Weather
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import run

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline import vote_state
from pier_node.rounds.attempt import Tools
from pier_node.rounds.folder import EARLIER_EVENTS_FILE, EVENTS_FILE, read_events
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.site import report
from pier_node.site.report import Reporter, note, phase_name
from pier_node.site.running import last_event
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

CONFIG = RunConfig.model_validate({"inner": {"total_steps": 100}, "outer": {"inner_steps": 10}})


async def _nowhere(state: OuterState) -> None:
    raise AssertionError("nothing is committed here")


async def _nobody(*_: object) -> OuterState:
    raise AssertionError("nothing is adopted here")


def test_before_there_is_a_state() -> None:
    async def main() -> None:
        carrier = Network(1, Weather()).join("a")
        reporter = Reporter(CONFIG, Site(node="a", name="lab"), carrier, Progress())
        roster = Roster(carrier, reporter.pulse)
        status = reporter.status(roster)
        assert (status["round"], status["digest"], status["members"], status["phase"]) == (0, "", [], "starting")
        assert math.isnan(status["loss"])
        assert math.isnan(status["utilisation"])
        assert status["rounds"] == 10

    run(main())


def test_it_reports_the_committed_round() -> None:
    async def main() -> None:
        network = Network(1, Weather())
        carrier = network.join("a")
        progress = Progress(Phase.PHASE_TRAINING, inner_step=35, tokens=700, compute=9.0, waited=1.0)
        reporter = Reporter(CONFIG, Site(node="a", name="lab", address="h:1"), carrier, progress)
        roster = Roster(carrier, reporter.pulse)
        tensors = {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}
        state = OuterState(3, ("a", "b"), tensors, {"a": 600, "b": 500})
        reporter.rounds = Rounds(
            Tools(carrier, roster, PlainStatements("a"), Disk(), MemoryProofs(), _nowhere, _nobody),
            state,
            lambda _: len(state.anchor),
        )
        roster.add(Site(node="b", name="other", address="h:2"))
        roster.contacts["b"].pulse = Pulse(site=Site(node="b"), round=3, digest=state.digest)
        status = reporter.status(roster)
        assert status["digest"] == state.digest.hex() == status["peers"][0]["digest"]
        assert (status["round"], status["members"], status["inner_step"]) == (3, ["a", "b"], 35)
        assert (status["tokens"], status["tokens_in_anchor"]) == (700, 1100)
        assert status["utilisation"] == 0.9
        pulse = reporter.pulse()
        assert (pulse.round, pulse.digest, pulse.phase) == (3, state.digest, Phase.PHASE_TRAINING)
        await roster.stop()

    run(main())


def test_tokens_count_once_though_each_fragment_has_its_own_count_of_them() -> None:
    async def main() -> None:
        carrier = Network(1, Weather()).join("a")
        reporter = Reporter(CONFIG, Site(node="a"), carrier, Progress())
        tensors = {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}
        state = OuterState(3, ("a", "b"), tensors, {"a": 600, "a/1": 550, "b": 500, "b/1": 450})
        assert reporter.event(state, Roster(carrier, reporter.pulse))["tokens_in_anchor"] == 1100

    run(main())


def test_the_tokens_of_a_pipeline_are_those_of_its_steps() -> None:
    async def main() -> None:
        carrier = Network(1, Weather()).join("a")
        config = RunConfig.model_validate({"run": {"sites": 2}, "pipeline": {"stages": 2, "microbatches": 6}})
        reporter = Reporter(config, Site(node="a"), carrier, Progress())
        state = vote_state.beginning(2, "a")
        state.anchor[vote_state.STEPS] = 7
        event = reporter.event(state, Roster(carrier, reporter.pulse))
        assert event["tokens_in_anchor"] == 7 * 6 * config.inner.batch_size * config.model.context

    run(main())


def test_the_message_names_sites() -> None:
    async def main() -> None:
        carrier, node = Network(1, Weather()).join("a"), "0123456789abcdef"
        reporter = Reporter(CONFIG, Site(node="a"), carrier, Progress())
        roster = Roster(carrier, reporter.pulse)
        state = OuterState(3, ("a", node), {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}, {})
        reporter.rounds = Rounds(
            Tools(carrier, roster, PlainStatements("a"), Disk(), MemoryProofs(), _nowhere, _nobody), state, lambda _: 4
        )
        roster.add(Site(node=node, name="lab-b", address="h:2"))
        reporter.rounds.last_error = f"absent: {node}"
        assert reporter.status(roster)["message"] == f"absent: lab-b ({node})"
        await roster.stop()

    run(main())


def test_the_spread_of_a_run_is_the_mean_of_what_live_sites_saw() -> None:
    async def main() -> None:
        carrier = Network(1, Weather()).join("a")
        reporter = Reporter(CONFIG, Site(node="a"), carrier, Progress(Phase.PHASE_TRAINING))
        roster = Roster(carrier, reporter.pulse)
        assert math.isnan(reporter.status(roster)["mean_spread"])
        assert math.isnan(reporter.pulse().spread)
        reporter.progress.spread = 0.3
        for node, spread, phase in (
            ("b", 0.1, Phase.PHASE_WAITING),
            ("c", math.nan, Phase.PHASE_TRAINING),
            ("d", 9.0, Phase.PHASE_LEAVING),
        ):
            roster.add(Site(node=node, address="h:2"))
            roster.contacts[node].pulse = Pulse(site=Site(node=node), phase=phase, spread=spread)
        status = reporter.status(roster)
        assert (status["algorithm"], status["spread"]) == ("pier", 0.3)
        assert status["mean_spread"] == pytest.approx(0.2)
        assert status["peers"][0]["spread"] == 0.1
        await roster.stop()

    run(main())


def test_phases_are_words() -> None:
    assert [phase_name(phase) for phase in (Phase.PHASE_STARTING, Phase.PHASE_LEAVING)] == ["starting", "leaving"]
    assert phase_name(Phase.PHASE_CATCHING_UP) == "catching up"


def test_a_line_follows_one_that_a_power_cut_tore(tmp_path: Path) -> None:
    for written in (b"", b'{"round":1}\n', b'{"round":1}\n{"rou'):
        (tmp_path / EVENTS_FILE).write_bytes(written)
        note(tmp_path, {"round": 2})
        note(tmp_path, {"round": 3})
        before = [{"round": 1}] if written else []
        assert read_events((tmp_path / EVENTS_FILE).read_bytes()) == [*before, {"round": 2}, {"round": 3}]
        assert last_event(tmp_path) == {"round": 3}


def test_the_lines_take_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_EVENTS", 100)
    for round in range(100):
        note(tmp_path, {"round": round})
        assert last_event(tmp_path) == {"round": round}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 250
    written = b"".join((tmp_path / name).read_bytes() for name in (EARLIER_EVENTS_FILE, EVENTS_FILE))
    assert [event["round"] for event in read_events(written)] == [*range(100)][-len(read_events(written)) :]


def test_a_committed_round_leaves_a_line(tmp_path: Path) -> None:
    async def main() -> None:
        carrier = Network(1, Weather()).join("a")
        reporter = Reporter(CONFIG, Site(node="a", name="lab"), carrier, Progress(inner_step=71))
        state = OuterState(4, ("a", "b"), {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}, {})
        note(tmp_path, reporter.event(state, Roster(carrier, reporter.pulse)))
        (line,) = (tmp_path / EVENTS_FILE).read_text().splitlines()
        event = json.loads(line)
        assert (event["round"], event["digest"], event["members"]) == (4, state.digest.hex(), ["a", "b"])
        assert (event["inner_step"], event["loss"]) == (71, None), "what the site is at, and JSON has no NaN"
        assert "peers" not in event

    run(main())

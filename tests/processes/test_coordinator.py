"""The coordinator with real sites: it watches and is obeyed, and nobody needs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any, get_args

import pytest
from processes.coordinated import coordinated, polite
from processes.run import ENDLESS
from processes.site import wait_until

from pier_node.wire.transport import Transport

pytestmark = pytest.mark.processes

STAGED: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-tiny", "layers": 3},
    "outer": {"algorithm": "sync"},
    "pipeline": {"stages": 3, "plan_seconds": 0.2},
}


@pytest.mark.smoke
def test_a_coordinator_that_is_killed_loses_nothing_and_stops_nobody(tmp_path: Path) -> None:
    with coordinated(tmp_path, 3, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(3)
        wait_until("rounds are reported", lambda: all(len(run.rounds(site)) >= 2 for site in run.sites))
        run.end(SIGKILL)
        known = run.facts()
        at = max(site.round for site in run.sites)
        for site in run.sites:
            site.reach(at + 3)
        run.start()
        assert run.facts()[: len(known)] == known
        at = max(site.round for site in run.sites)
        wait_until("all is told", lambda: all(max(run.rounds(site)) >= at for site in run.sites))
        for site in run.sites:
            reported, committed = run.rounds(site), [event["round"] for event in site.events()]
            assert reported == committed[: len(reported)]
            assert site.output.count("the coordinator does not answer; training continues without it") == 1
            assert site.output.count("the coordinator is back") == 1
        polite(run)


def test_after_a_restart_the_page_of_a_run_that_is_over_shows_what_it_showed(tmp_path: Path) -> None:
    with coordinated(tmp_path, 2) as run:
        for site in run.sites:
            assert site.ended() == 0
        wait_until("all have left", lambda: str(run.facts()).count("has left") == len(run.sites))
        wait_until("the page knows", lambda: {run.state(site) for site in run.sites} == {"done"})
        before = run.get("/api/board")
        assert run.end(SIGTERM) == 0
        run.start()
        after = run.get("/api/board")
        for part in ("totals", "curves", "rounds", "samples", "links", "sites", "events"):
            assert without(after[part], "stamp", "heard") == without(before[part], "stamp", "heard"), part


def without(told: Any, *keys: str) -> Any:
    """The same at any depth without these keys."""
    if isinstance(told, dict):
        return {key: without(value, *keys) for key, value in told.items() if key not in keys}
    return [without(value, *keys) for value in told] if isinstance(told, list) else told


def test_either_of_two_sites_goes_on_alone_with_the_vote_of_the_coordinator(tmp_path: Path) -> None:
    """The one with the higher node id, too, which else would wait; and after the coordinator was killed."""
    with coordinated(tmp_path, 2, run={"witness": True}, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(2)
        low, high = sorted(run.sites, key=lambda site: site.node)
        for lost, left in ((low, high), (high, low)):
            lost.kill()
            at = left.round
            left.reach(at + 3)
            assert "half of its members are missing, and the witness gives its vote" in left.output
            assert left.events()[-1]["members"] == [left.node]
            lost.start()
            lost.rejoin()
            run.end(SIGKILL)
            run.start()
            left.reach(left.round + 2)
        told = [body["text"] for _, kind, _, body in run.facts() if kind == "event"]
        assert any(f"gave {high.name} its vote for round" in text for text in told)
        digests = [{event["round"]: event["digest"] for event in site.events()} for site in run.sites]
        assert all(digests[0][round] == digests[1][round] for round in digests[0].keys() & digests[1].keys())
        polite(run)


def test_half_of_the_sites_wait_if_the_coordinator_is_away_too(tmp_path: Path) -> None:
    with coordinated(tmp_path, 2, run={"witness": True}, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(2)
        low, high = sorted(run.sites, key=lambda site: site.node)
        run.end(SIGKILL)
        high.kill()
        low.wait("it says why", lambda: "the witness does not give its vote" in low.status().get("message", ""))
        at = low.round
        run.start()
        low.reach(at + 3)
        high.start()
        high.rejoin()
        polite(run)


@pytest.mark.parametrize("transport", get_args(Transport))
def test_sites_do_what_the_operator_says(tmp_path: Path, transport: Transport) -> None:
    with coordinated(tmp_path, 2, transport, inner=ENDLESS) as run:
        second = run.sites[1]
        second.reach(2)
        assert "all sites: pause" in run.say("pause")
        # One may have done the inner steps for a round that the other did not begin any more: it waits.
        wait_until("they pause", lambda: {"paused"} <= {run.state(site) for site in run.sites} <= {"paused", "waiting"})
        at = [site.round for site in run.sites]
        assert max(at) - min(at) <= 1
        run.say("resume")
        for site, round in zip(run.sites, at, strict=True):
            site.reach(round + 2)
        run.say("stop", "beta")
        assert second.ended() == 0
        second.start()
        second.rejoin()
        assert "beta" in run.say("nodes")
        polite(run)


def test_sites_of_a_pipeline_hold_the_stages_that_the_operator_gives_them_and_pause(tmp_path: Path) -> None:
    with coordinated(tmp_path, 3, "grpc", inner=ENDLESS, **STAGED) as run:
        alpha, beta, gamma = run.sites
        gamma.daemon.suspend()  # the run begins with three
        for site, stage in ((alpha, 2), (beta, 0)):
            site.wait("it is let in", lambda site=site: bool(run.state(site)))  # type: ignore[misc]
            run.say("assign", site.name, "stage", str(stage))
        gamma.daemon.resume()
        for site, stage in ((alpha, 2), (beta, 0), (gamma, 1)):
            site.wait(f"holds stage {stage}", lambda at=site.folder / f"stage-{stage}": at.exists())  # type: ignore[misc]
            site.reach(2)
        run.say("pause")
        wait_until("they pause", lambda: {"paused"} <= {run.state(site) for site in run.sites} <= {"paused", "waiting"})
        at = max(site.round for site in run.sites)
        run.say("resume")
        for site in run.sites:
            site.reach(at + 2)
        polite(run)


@pytest.mark.smoke
def test_a_revoked_site_is_out(tmp_path: Path) -> None:
    with coordinated(tmp_path, 3, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(2)
        revoked, *others = sorted(run.sites, key=lambda site: site.node)[::-1]
        run.say("revoke", revoked.name)
        assert revoked.ended() == 1
        assert "Error: the coordinator does not have this site in the run" in revoked.output
        for site in others:
            site.wait("knows it", lambda site=site: f"{revoked} was revoked" in site.output)  # type: ignore[misc]
            site.reach(site.round + 3)
        revoked.start()
        assert revoked.ended() == 1
        assert run.state(revoked) == "revoked"
        links = run.get("/api/links")["links"]
        assert {node for link in links for node in (link["node"], link["peer"])} == {site.node for site in others}
        run.sites.remove(revoked)
        polite(run)


def test_a_site_stays_revoked_while_the_coordinator_is_away(tmp_path: Path) -> None:
    with coordinated(tmp_path, 3, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(2)
        first, away, revoked = sorted(run.sites, key=lambda site: site.node)
        assert away.stop() == 0
        run.say("revoke", revoked.name)
        assert revoked.ended() == 1
        first.wait("knows it", lambda: f"{revoked} was revoked" in first.output)
        run.end(SIGKILL)
        assert first.stop() == 0
        for site in run.sites:
            site.start()
        away.wait("hears of it", lambda: (away.folder / "revoked.json").exists())
        revoked.wait("is refused", lambda: revoked.output.count("was revoked by the run's operator") > 3)
        away.rejoin()
        first.reach(first.round + 3)
        for site in (first, away):
            assert all(revoked.node not in event["members"] for event in site.events()[-3:])
            assert revoked.node not in {peer["node"] for peer in site.status()["peers"]}
        assert "was revoked by the run's operator" in revoked.output
        revoked.kill()


def test_the_page_says_why_a_site_ended(tmp_path: Path) -> None:
    with coordinated(tmp_path, 2, inner=ENDLESS) as run:
        for site in run.sites:
            site.reach(2)
        broken = run.sites.pop()
        broken.kill()
        shutil.rmtree(broken.folder / "checkpoints")
        (broken.folder / "checkpoints").touch()  # no checkpoint can be saved, as on a full disk
        broken.start()
        assert broken.ended() == 1
        assert "Error: cannot save a checkpoint in" in broken.output
        reason = "pier-node ends here: cannot save a checkpoint in"
        wait_until("the page tells", lambda: any(reason in it["text"] for it in run.get("/api/events")["events"]))
        assert reason in " ".join(run.say("logs").split())
        polite(run)

"""Killed and started again by the same command: the run goes on, and to the last bit where it would have gone."""

from __future__ import annotations

import json
from signal import SIGKILL
from typing import Any

import pytest
from processes.run import Found, Run
from safetensors.numpy import load_file

pytestmark = pytest.mark.processes

ROUNDS = 12


def twins(found: Found, sites: int, **outer: Any) -> tuple[Run, Run]:
    """Two runs that are the same in everything that may matter."""
    outer = {"inner_steps": 50, "adaptive_steps": False, **outer}
    steps = (ROUNDS + 1 - outer.get("fragments", 1)) * outer["inner_steps"] // outer.get("fragments", 1)
    tables = {"inner": {"total_steps": steps}, "outer": outer}
    first = found(sites, **tables)
    return first, found(sites, twin=first, **tables)


def assert_equal_to_the_bit(run: Run, other: Run) -> None:
    """Anchor, momentum, AdamW's moments and all that is counted."""
    for pair in zip(run.sites, other.sites, strict=True):
        folders = [site.folder / "checkpoints" / f"round-{ROUNDS:08d}" for site in pair]
        for name, keys in (("state", {"anchor", "momentum"}), ("local", {"adam_m", "adam_v"})):
            mine, theirs = (load_file(folder / f"{name}.safetensors") for folder in folders)
            assert set(mine) == set(theirs) >= keys
            assert all(mine[key].tobytes() == theirs[key].tobytes() for key in mine), f"{pair[0]}: {name}"
        mine, theirs = (json.loads((folder / "checkpoint.json").read_text()) for folder in folders)
        assert mine == theirs


def test_all_sites_killed_at_once_go_on(found: Found) -> None:
    run = found(3, inner={"total_steps": 30 * 30}, outer={"inner_steps": 30})
    run.start()
    for site in run.sites:
        site.reach(5)
    for site in run.sites:
        site.kill()
    killed_at = max(site.round for site in run.sites)
    assert killed_at < 30
    run.start()
    run.finish()
    assert {site.round for site in run.sites} == {30}


def test_who_returns_after_the_end_says_that_a_site_that_has_finished_must_be_started(found: Found) -> None:
    run = found(2, inner={"total_steps": 20 * 30}, outer={"inner_steps": 30})
    first, other = run.by_node
    run.start()
    other.reach(5)
    other.kill()
    assert first.ended() == 0
    assert f"not finished: {other.name} ({other.node})" in " ".join(first.output.split())
    other.start()
    said = "does not answer, and this site cannot continue without it."
    other.wait("says whom it waits for", lambda: said in other.status().get("message", ""))
    assert first.node in other.status()["message"]  # by its name too, if there was time to write that down
    assert "run `pier-node start --data FOLDER` there again" in other.status()["message"]
    first.start()
    assert (first.ended(), other.ended()) == (0, 0)
    assert "caught up with round 20" in other.output


@pytest.mark.parametrize("overlap", [False, True])
def test_a_killed_site_ends_with_the_bits_of_one_that_was_not(found: Found, overlap: bool) -> None:
    # Without a codec: what one dropped of a round that was kept, but not yet in a checkpoint, is lost with the process.
    ways = {"algorithm": "diloco", "overlap": True, "fragments": 2, "inner_steps": 100}
    straight, killed = twins(found, 1, **ways if overlap else {"algorithm": "pier"})
    straight.start()
    straight.finish()
    killed.start()
    for rounds in (2, 7):
        killed.sites[0].reach(rounds)
        killed.sites[0].kill()
        assert killed.sites[0].round < ROUNDS
        killed.start()
    killed.finish()
    assert_equal_to_the_bit(straight, killed)
    straight.start()
    straight.finish()
    assert straight.sites[0].output.count("The run is finished") == 2
    assert_equal_to_the_bit(straight, killed)


def test_with_few_checkpoints_a_killed_site_goes_on_from_its_last_state(found: Found) -> None:
    run = found(1, inner={"total_steps": ROUNDS * 50}, outer={"inner_steps": 50, "algorithm": "diloco"})
    (site,) = run.sites
    every = "--checkpoint-every", "5"
    site.start(*every)
    site.reach(8)
    site.kill()
    kept, saved = (
        max(int(found.name[6:]) for found in (site.folder / name).glob("round-*[0-9]"))
        for name in ("states", "checkpoints")
    )
    assert kept >= 8 > saved == 5
    site.start(*every)
    run.finish()
    assert f"Resuming at round {kept}" in site.output
    written = site.folder / "checkpoints" / f"round-{ROUNDS:08d}"
    assert {"adam_m", "adam_v"} <= set(load_file(written / "local.safetensors")), "the last round has one in any case"


def test_two_killed_sites_end_with_the_bits_of_two_that_were_not(found: Found) -> None:
    straight, killed = twins(found, 2, algorithm="diloco")
    straight.start()
    straight.finish()
    for site in killed.sites:
        site.start("--fail-at", "5:ready")
    for site in killed.sites:
        assert site.ended() == -SIGKILL
        assert site.round == 4
    # Of two sites the leader may go on alone: it comes last, or a round would have other members.
    for site in reversed(killed.by_node):
        site.start()
        site.take_part()
    killed.finish()
    assert_equal_to_the_bit(straight, killed)
    for site in killed.sites:
        sent = [event["bytes_sent"] for event in site.events()]
        assert sent == sorted(sent), "the count goes on after a restart"
        assert sent[-1] > 1.5 * sent[4]

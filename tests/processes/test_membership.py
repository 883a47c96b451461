"""Sites that come while a run is under way, leave politely, come back, or fall silent for a while."""

from __future__ import annotations

import json
from functools import partial
from signal import SIGTERM
from typing import Any

import pytest
from processes.run import ENDLESS, Found, Run, held
from processes.site import LEAVING, Site

from bench.ports import free_port
from pier_node.wire.transport import Transport

pytestmark = pytest.mark.processes

TABLES: dict[str, Any] = {"inner": ENDLESS, "outer": {"inner_steps": 10}}


def members(site: Site) -> int:
    """How many took part in the last round that a site committed."""
    return len(site.events()[-1]["members"])


def goes_on_with(site: Site, count: int) -> None:
    """Wait until so many take part in its rounds."""
    site.wait(f"goes on with {count}", lambda: members(site) == count)


def says(site: Site, text: str) -> bool:
    return text in site.output


def newest(site: Site) -> dict[str, Any]:
    """Of its checkpoints."""
    return dict(json.loads((max((site.folder / "checkpoints").glob("round-*")) / "checkpoint.json").read_text()))


def leaves(site: Site, others: list[Site]) -> None:
    """It says goodbye, and the others wait while it ends."""
    site.send(SIGTERM)
    for other in others:
        other.wait("hears the goodbye", partial(says, other, f"{site} has left"))
    with held(others):
        assert site.ended(LEAVING) == 0


def nothing_was_lost(run: Run) -> None:
    """Stop them all: every token that any site trained on is in the last anchor, or kept for the next one."""
    run.stop()
    kept = {site.node: newest(site) for site in run.sites}
    ledger = max(kept.values(), key=lambda checkpoint: checkpoint["round"])["ledger"]
    for node, checkpoint in kept.items():
        assert checkpoint["tokens"] - ledger[node] in (0, *checkpoint["pending_tokens"])


@pytest.mark.parametrize("transport", [pytest.param("grpc", marks=pytest.mark.smoke), "hivemind"])
def test_a_third_site_joins_a_run_in_progress(found: Found, transport: Transport) -> None:
    run = found(2, transport=transport, **TABLES)
    run.start()
    for site in run.sites:
        site.reach(5)
    late = run.add("late")
    with held(run.sites[:2]):
        late.start()
        late.take_part()
    late.rejoin()
    assert late.events()[0]["round"] > 5
    goes_on_with(run.sites[0], 3)
    nothing_was_lost(run)


def test_sites_leave_politely_and_come_back(found: Found) -> None:
    run = found(3, **TABLES)
    run.start()
    lowest, middle, highest = run.by_node
    lowest.reach(3)
    leaves(middle, [lowest, highest])
    for site in (lowest, highest):
        goes_on_with(site, 2)
    # Of two, the one with the higher id has no majority of its own: it goes on with the vote that it was given.
    leaves(lowest, [highest])
    goes_on_with(highest, 1)
    highest.reach(highest.round + 2)
    assert "does not answer" not in highest.output
    with held([highest]):
        for site in (lowest, middle):
            site.start()
        for site in (lowest, middle):
            site.take_part()
    goes_on_with(highest, 3)
    nothing_was_lost(run)


def test_a_paused_site_catches_up_and_brings_what_it_learned(found: Found) -> None:
    run = found(3, **TABLES)
    run.start()
    paused, *others = run.sites
    paused.reach(3)
    paused.hold()
    for site in others:
        site.be("waiting")
    paused.daemon.suspend()
    at = max(site.round for site in run.sites)  # it may have its part in one more, which was under way
    for site in others:
        site.reach(at + 5)
    with held(others):
        paused.daemon.resume()
        paused.release()
        paused.wait("catches up", lambda: "caught up" in paused.output)
    paused.reach(at + 7)
    assert not {at + 2, at + 3} & {event["round"] for event in paused.events()}
    nothing_was_lost(run)


def test_the_last_round_is_on_the_disk_of_a_site_that_had_to_fetch_it(found: Found) -> None:
    run = found(3, inner={"total_steps": 200}, outer={"inner_steps": 10})
    run.start()
    late, *others = run.sites
    late.reach(8)  # by now they know how long to wait for each other
    late.hold()
    for site in others:
        site.reach(20)
    late.release()
    assert [site.ended() for site in run.sites] == [0, 0, 0]
    assert "caught up with round 20" in late.output
    assert [newest(site)["round"] for site in run.sites] == [20, 20, 20]


def test_a_site_goes_on_with_its_folder_alone(found: Found) -> None:
    run = found(2, **TABLES)
    run.start()
    second = run.sites[1]
    second.reach(2)
    assert second.stop() == 0
    second.command = [second.command[0], "start", "--data", str(second.folder)]
    second.start()
    second.rejoin()
    assert second.status()["address"] == second.address
    run.stop()


def test_a_new_address_is_noted_as_soon_as_it_is_known(found: Found) -> None:
    """If this site moves next, the other cannot find it: it has to find the other."""
    run = found(2, **TABLES)
    run.start()
    first, second = run.sites
    first.reach(1)
    assert second.stop() == 0
    address = f"127.0.0.1:{free_port()}"
    second.command = [second.command[0], "start", "--data", str(second.folder), "--listen", address]
    second.start()
    first.wait("hears of it", lambda: [it["address"] for it in first.status().get("peers", ())] == [address])
    first.wait("notes it", lambda: address in (first.folder / "site.json").read_text(), within=3.0)
    run.stop()

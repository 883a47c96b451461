from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator.cases import ALICE, BOB, NOW, Clock, pulse

from pier_coordinator.runs.sites import LEASE_SECONDS, Registry
from pier_coordinator.store.facts import event
from pier_coordinator.store.sites import SiteRow, Superseded, Unregistered
from pier_proto.v1.peer_pb2 import Phase

SITE = SiteRow(ALICE.node, "lab-a", NOW, "invite", lease=b"one", gone=False)
OTHER = SiteRow(BOB.node, "lab-b", NOW, "invite", lease=b"two", gone=False)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def registry(clock: Clock) -> Registry:
    registry = Registry(clock, lambda: NOW)
    registry.admit(SITE)
    return registry


def test_a_lease_runs_out_once(registry: Registry, clock: Clock) -> None:
    clock.now = LEASE_SECONDS - 0.01
    assert registry.expire() == []
    clock.now = LEASE_SECONDS
    assert registry.expire() == [event(NOW, "lab-a is silent for 15 s", ALICE.node, 30, "silent")]
    assert registry.expire() == []
    assert not registry.holder(ALICE.node, b"one").alive
    assert not registry.is_here(ALICE.node)


def test_who_has_a_lease_is_here(registry: Registry) -> None:
    assert registry.is_here(ALICE.node)
    assert not registry.is_here(BOB.node)


def test_heartbeats_keep_a_lease(registry: Registry, clock: Clock) -> None:
    for clock.now in (10.0, 20.0, 30.0, 40.0):
        assert registry.beat(registry.holder(ALICE.node, b"one"), pulse(ALICE, round=3), 2) is None
        assert registry.expire() == []
    presence = registry.holder(ALICE.node, b"one")
    assert presence.follows == 2
    assert presence.pulse == pulse(ALICE, round=3)
    assert presence.offset is None


def test_how_far_a_clock_is_off_is_seen_when_a_heartbeat_comes(registry: Registry) -> None:
    presence, said = registry.holder(ALICE.node, b"one"), pulse(ALICE)
    said.time = NOW + 3600
    registry.beat(presence, said, 1)
    assert presence.offset == 3600


def test_a_site_that_comes_back_is_welcomed_once(registry: Registry, clock: Clock) -> None:
    clock.now = 42.0
    registry.expire()
    presence = registry.holder(ALICE.node, b"one")
    assert registry.beat(presence, pulse(ALICE), 1) == event(NOW, "lab-a is back after 42 s", ALICE.node)
    assert registry.beat(presence, pulse(ALICE), 1) is None


def test_a_site_that_was_silent_and_is_started_again_is_welcomed_too(registry: Registry, clock: Clock) -> None:
    clock.now = 30.0
    registry.expire()
    registry.admit(replace(SITE, lease=b"new"))
    presence = registry.holder(ALICE.node, b"new")
    clock.now = 31.0
    assert not presence.alive
    assert registry.beat(presence, pulse(ALICE), 1) == event(NOW, "lab-a is back after 31 s", ALICE.node)
    clock.now = 32.0
    registry.admit(replace(SITE, lease=b"third"))
    clock.now = 33.0
    assert registry.beat(registry.holder(ALICE.node, b"third"), pulse(ALICE), 1) is None, "it was not missed"


@pytest.mark.parametrize("phase", [Phase.PHASE_LEAVING, Phase.PHASE_DONE])
def test_a_site_that_said_good_bye_is_not_called_silent(
    registry: Registry, clock: Clock, phase: Phase.ValueType
) -> None:
    registry.beat(registry.holder(ALICE.node, b"one"), pulse(ALICE, phase), 1)
    clock.now = LEASE_SECONDS
    assert registry.expire() == [event(NOW, "lab-a has left", ALICE.node, state="left")]


def test_a_lease_is_told_from_others(registry: Registry) -> None:
    with pytest.raises(Unregistered, match="it must register"):
        registry.holder(BOB.node, b"one")
    with pytest.raises(Superseded, match="another start of this site"):
        registry.holder(ALICE.node, b"two")


def test_who_watches_is_woken_when_the_lease_ends(registry: Registry) -> None:
    first = registry.holder(ALICE.node, b"one").changed
    registry.admit(SITE)
    second = registry.holder(ALICE.node, b"one").changed
    assert (first.is_set(), second.is_set()) == (True, False)
    registry.remove(ALICE.node)
    assert second.is_set()
    assert registry.get(ALICE.node) is None
    registry.remove(ALICE.node)


def test_a_signal_is_given_once(registry: Registry) -> None:
    presence = registry.holder(ALICE.node, b"one")
    first = presence.changed
    presence.notify()
    assert first.is_set()
    assert not presence.changed.is_set()


def test_after_a_restart_who_was_here_has_a_lease_to_say_so(clock: Clock) -> None:
    registry = Registry(clock, lambda: NOW)
    gone = SiteRow(BOB.node, "lab-b", NOW, "invite", lease=b"two", gone=True)
    never, revoked = (SiteRow("0" * 16, "c", NOW, "invite"), SiteRow("1" * 16, "d", NOW, "invite", NOW, lease=b"x"))
    registry.restore([SITE, gone, never, revoked])
    assert registry.get("0" * 16) is registry.get("1" * 16) is None
    clock.now = LEASE_SECONDS
    assert [fact.node for fact in registry.expire()] == [ALICE.node]
    clock.now = 20.0
    assert registry.beat(registry.holder(BOB.node, b"two"), pulse(BOB), 1) is not None

from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.doctor.visit import _SIGNS, to_be_reached, to_reach_peer
from pier_node.wire.grpc import reasons

HERE, THERE = "10.0.0.1:7700", "10.0.0.2:7801"
DOWN = f"{THERE}: no connection within 10 s: it is down, or behind a firewall"
UNNAMED = "The log of that site says more."


# A connection that was there and went silent is nothing that settings mend.
@pytest.mark.parametrize("text", [text for sign, text in reasons._SIGNS if sign != "keepalive"])
def test_every_reason_that_the_wire_gives_has_a_remedy_of_its_own(text: str) -> None:
    assert to_reach_peer(THERE, f"{THERE}: {text}") != UNNAMED


def test_no_remedy_is_for_what_nobody_says() -> None:
    """Reasons come from the wire's translations, from calling cards and from the reception."""
    wire = Path(reasons.__file__).parent.parent
    files = [wire / name for name in ("grpc/reasons.py", "grpc/carrier.py", "libp2p/host.py", "metadata.py")]
    said = "".join(path.read_text() for path in [*files, wire.parent / "site/join.py", wire / "probe.py"])
    missing = [sign for sign, _ in _SIGNS if sign not in said]
    assert not missing


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (DOWN, "At that site: open TCP port 7801 on the firewall and forward it on the router"),
        (f"{THERE}: connection refused: nothing listens there", "Start that site"),
        (f"{THERE}: its certificate is of another run: the tokens differ", "Use the token that the run's first site"),
        (f"{THERE}: it does not speak TLS: it was started with --insecure, or is no Pier node", "or none"),
        ("this is run aaaaaaaa, the caller is in run bbbbbbbb", "different runs"),
        ("something new", UNNAMED),
    ],
)
def test_to_reach_a_peer(reason: str, remedy: str) -> None:
    assert remedy in to_reach_peer(THERE, reason)


def test_to_be_reached() -> None:
    refused = to_be_reached(HERE, f"{HERE}: connection refused: nothing listens there", "")
    assert "--listen 0.0.0.0:7700" in refused
    blocked = to_be_reached(HERE, f"{HERE}: no connection within 8 s: it is down, or behind a firewall", "")
    assert "At this site: open TCP port 7700" in blocked
    assert "--advertise HOST:7700" in blocked
    assert to_be_reached(HERE, "something new", "").startswith("Open TCP port 7700")


def test_an_address_that_a_router_translates_is_pointed_out() -> None:
    hint = "sees this site as 203.0.113.5: try --advertise 203.0.113.5:7700"
    assert hint in to_be_reached(HERE, "no route to that host", "203.0.113.5:40000")
    assert "sees this site" not in to_be_reached(HERE, "no route to that host", "10.0.0.1:40000")

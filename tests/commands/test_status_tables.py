from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from pier_node.commands.daemon import disk_table, peers_table, site_table

PEER = {
    "node": "b" * 16,
    "name": "beta",
    "address": "10.0.0.2:7700",
    "alive": True,
    "phase": "training",
    "round": 12,
    "digest": "ab" * 32,
    "inner_step": 600,
    "tokens_per_second": 45_678.9,
    "loss": 2.3456,
    "spread": 0.00321,
    "bytes_sent": 1,
    "round_trip": 0.0421,
    "last_error": "",
}
STATUS = {
    "run": "lake",
    "run_hash": "cd" * 32,
    "algorithm": "pier",
    "rounds": 60,
    "total_steps": 3000,
    "members": ["a" * 16, "b" * 16],
    "fingerprint": "12-" + "ef" * 20,
    "tokens_in_anchor": 5,
    "node": "a" * 16,
    "name": "alpha",
    "address": "10.0.0.1:7700",
    "phase": "waiting",
    "round": 12,
    "digest": "ab" * 32,
    "inner_step": 600,
    "tokens": 1_234_567,
    "tokens_per_second": 12_345.6,
    "loss": 2.4567,
    "validation_loss": None,
    "spread": None,
    "expert": "",
    "metrics": {},
    "mean_spread": None,
    "bytes_sent": 98_700_000,
    "round_seconds": 1.234,
    "utilisation": 0.874,
    "message": "",
    "peers": [PEER],
}


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def status(**fields: Any) -> dict[str, Any]:
    return {**STATUS, **fields}


def peer(**fields: Any) -> dict[str, Any]:
    return status(peers=[{**PEER, **fields}])


def test_a_site_with_units() -> None:
    text = shown(site_table(STATUS))
    for part in (
        "alpha (aaaaaaaaaaaaaaaa) at 10.0.0.1:7700",
        "lake (cdcdcdcd)",
        "12 of 60, step 600 of 3,000",
        "digest abababababab, made by 2 sites",
        "12-" + "ef" * 20,
        "waiting",
        "2.4567, validation - (nats a token)",
        "12,346 tokens/s; 1,234,567 tokens so far",
        "98.7 MB; last outer round 1.23 s",
        "87 % of the time in inner steps",
    ):
        assert part in text
    assert "message" not in text


def test_in_pairs_the_spread_takes_the_place_of_the_digest() -> None:
    pairs = status(algorithm="noloco", spread=0.00123, mean_spread=None)
    assert "spread 1.23e-03, - over all sites" in shown(site_table(pairs))
    assert "3.21e-03" in shown(peers_table(pairs))
    assert "same state" not in shown(peers_table(pairs))
    assert "spread" not in shown(site_table(STATUS)) + shown(peers_table(STATUS))


def test_brackets_are_no_markup() -> None:
    assert "at [fd00::5]:7700" in shown(site_table(status(address="[fd00::5]:7700")))
    assert "round 13: waiting [for] 1 more" in shown(site_table(status(message="round 13: waiting [for] 1 more")))


def test_a_site_that_has_nothing_yet() -> None:
    text = shown(site_table(status(digest="", fingerprint="", members=[], loss=None, utilisation=None, address="")))
    assert "no address yet" in text
    assert "digest -" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_peer_fits_one_line_of_a_terminal(width: int) -> None:
    header, line = shown(peers_table(STATUS), width).splitlines()
    assert header.split() == ["site", "phase", "round", "same", "state", "loss", "tokens/s", "ms", "away", "alive"]
    assert line.split() == ["beta", "training", "12", "✓", "yes", "2.346", "45,679", "42.1", "yes"]


@pytest.mark.parametrize(
    ("fields", "agreement"),
    [
        ({}, "✓ yes"),
        ({"digest": "cd" * 32}, "✗ NO"),
        ({"digest": "cd" * 32, "round": 11}, "behind"),
        ({"digest": "cd" * 32, "round": 13}, "ahead"),
        ({"digest": "", "round": 0}, "  -  "),
    ],
)
def test_agreement_is_said_in_words(fields: dict[str, Any], agreement: str) -> None:
    assert agreement in shown(peers_table(peer(**fields)))


def test_why_a_peer_is_silent_is_said() -> None:
    text = shown(peers_table(peer(alive=False, last_error="10.0.0.2:7700: no answer within 5 s")))
    assert text.splitlines()[1].split()[-1] == "no"
    assert "beta is silent: 10.0.0.2:7700: no answer within 5 s" in text


def test_a_long_name_does_not_push_the_numbers_out() -> None:
    text = shown(peers_table(peer(name="x" * 100, phase="catching up")))
    first = text.splitlines()[1]
    assert first.split()[1:] == ["catching", "up", "12", "✓", "yes", "2.346", "45,679", "42.1", "yes"]
    assert text.count("x") == 100


def test_no_peers() -> None:
    assert "No other site is known yet" in shown(peers_table(status(peers=[])))


def test_a_site_that_does_not_run() -> None:
    found = {"data": "pier-data", "command": "pier-node start --data pier-data", "run": "lake", "run_hash": "cd" * 32}
    saved = {"rounds": 60, "round": 12, "digest": "ab" * 32, "age_seconds": 300.0}
    text = shown(disk_table({**found, **saved}))
    assert "No daemon runs for pier-data." in text
    assert "round 12 of 60, digest abababababab, saved 5 min ago" in text
    assert "pier-node start --data pier-data" in text
    assert "no checkpoint yet of 60 rounds" in shown(disk_table({**found, "rounds": 60}))
    assert "has not been started" in shown(disk_table({"data": "x", "command": "pier-node start"}))


def test_a_site_that_trains_an_expert_says_which() -> None:
    text = shown(site_table({**STATUS, "expert": "topics (L), step 5 of 400"}))
    assert "expert" in text
    assert "topics (L), step 5 of 400" in text
    assert "expert" not in shown(site_table(STATUS))

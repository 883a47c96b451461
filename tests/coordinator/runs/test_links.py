"""Links between sites, as they were measured last."""

from __future__ import annotations

from pier_coordinator.runs.sites import MOST_LINKS, Links


def test_the_newest_measurement_of_a_link_counts() -> None:
    links = Links()
    links.take("a", {"peer": "b", "round_trip": 0.1, "bandwidth": 1e6, "bytes_sent": 5}, 1)
    links.take("a", {"peer": "b", "round_trip": 0.2, "bandwidth": 2e6, "bytes_sent": 9}, 2)
    assert links.rows() == [
        {"node": "a", "peer": "b", "round_trip": 0.2, "bandwidth": 2e6, "bytes_sent": 9, "stamp": 2}
    ]


def test_a_bandwidth_of_zero_is_not_known() -> None:
    links = Links()
    links.take("a", {"peer": "b", "round_trip": 0.1, "bandwidth": 0}, 1)
    assert links.rows()[0]["bandwidth"] is None
    assert links.uplink("a") is None


def test_a_bandwidth_lasts_until_it_is_measured_again() -> None:
    links = Links()
    for bandwidth in (3e6, 0):
        links.take("a", {"peer": "b", "bandwidth": bandwidth}, 1)
    assert (links.rows()[0]["bandwidth"], links.uplink("a")) == (3e6, 3e6)


def test_the_uplink_is_the_best_way_out() -> None:
    links = Links()
    links.take("a", {"peer": "b", "bandwidth": 1e6}, 1)
    links.take("a", {"peer": "c", "bandwidth": 8e6}, 2)
    links.take("c", {"peer": "a", "bandwidth": 99e6}, 3)
    assert links.uplink("a") == 8e6


def test_links_are_chosen_by_stamp_and_by_site() -> None:
    links = Links()
    for stamp, (who, peer) in enumerate([("a", "b"), ("b", "c"), ("c", "a")], start=1):
        links.take(who, {"peer": peer}, stamp)
    assert [link["node"] for link in links.rows(since=2)] == ["c"]
    assert [link["node"] for link in links.rows(node="a")] == ["a", "c"]
    assert len(links.rows(most=2)) == 2


def test_a_revoked_site_has_no_links_nor_gets_any() -> None:
    links = Links()
    for stamp, (who, peer) in enumerate([("a", "b"), ("b", "c"), ("c", "a")], start=1):
        links.take(who, {"peer": peer, "bandwidth": 1e6}, stamp)
    links.revoke("b")
    links.take("c", {"peer": "b", "bandwidth": 9e6}, 4)
    links.take("b", {"peer": "c"}, 5)
    assert [(link["node"], link["peer"]) for link in links.rows()] == [("c", "a")]
    assert (links.uplink("a"), links.uplink("c")) == (None, 1e6)


def test_the_oldest_links_are_forgotten() -> None:
    links = Links()
    for peer in range(MOST_LINKS + 10):
        links.take("a", {"peer": str(peer), "bandwidth": float(peer + 1)}, peer)
    assert len(links) == MOST_LINKS
    assert links.rows()[0]["peer"] == "10"
    assert links.uplink("a") == MOST_LINKS + 10

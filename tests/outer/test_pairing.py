"""Pairing: docs/noloco.md, "Who meets whom"."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from pier_node.outer.noloco import epoch_of, groups, partner

ROUNDS = 10_000
NAMES = [f"{7919 * number:016x}" for number in range(1, 9)]

nodes = st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=1, max_size=12, unique=True)


@given(st.integers(0, 2**63 - 1), st.integers(1, 10**6), nodes, st.integers(1, 5))
def test_every_member_is_in_one_group(seed: int, round: int, members: list[str], size: int) -> None:
    found = groups(seed, round, members, size)
    assert sorted(node for group in found for node in group) == sorted(members)
    assert all(group == tuple(sorted(group)) for group in found)
    assert sorted(map(len, found)) == sorted([size] * (len(members) // size) + [1] * (len(members) % size))


@given(st.integers(0, 99), st.integers(1, 99), nodes, st.randoms())
def test_it_does_not_matter_in_which_order_members_are_known(
    seed: int, round: int, members: list[str], dice: object
) -> None:
    assert groups(seed, round, members) == groups(seed, round, members[::-1] + members[:1])


@given(st.integers(0, 99), st.integers(1, 99), nodes)
def test_partners_agree(seed: int, round: int, members: list[str]) -> None:
    for node in members:
        other = partner(seed, round, members, node)
        assert other != node
        assert other is None or partner(seed, round, members, other) == node
    assert sum(partner(seed, round, members, node) is None for node in members) == len(members) % 2


def test_seed_round_and_epoch_each_change_it() -> None:
    drawn = groups(1, 1, NAMES)
    assert groups(1, 1, NAMES) == drawn
    assert groups(2, 1, NAMES) != drawn
    assert groups(1, 2, NAMES) != drawn
    without = [group for group in groups(1, 1, NAMES[:-2]) if group in drawn]
    assert len(without) < 3
    assert epoch_of(NAMES) == epoch_of(NAMES[::-1]) != epoch_of(NAMES[:-1])


def test_its_values_are_known() -> None:
    """Two versions of Pier in one run must not disagree: when these change, so does the protocol's number."""
    assert groups(1, 1, ["a", "b", "c", "d", "e"]) == GOLDEN
    assert epoch_of(["b", "a"]).hex()[:16] == "7e18f737311b2dc3"


GOLDEN = [("a", "e"), ("c", "d"), ("b",)]


def test_another_process_finds_the_same() -> None:
    code = f"from pier_node.outer.noloco import groups; print(groups(5, 6, {NAMES!r}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == str(groups(5, 6, NAMES))


def test_partners_are_uniform() -> None:
    met = Counter(group for number in range(1, ROUNDS + 1) for group in groups(3, number, NAMES))
    pairs = list(combinations(sorted(NAMES), 2))
    assert set(met) == set(pairs)
    assert chisquare([met[pair] for pair in pairs]).pvalue > 0.01


def test_the_odd_one_out_is_anybody() -> None:
    odd = Counter(groups(4, number, NAMES[:5])[-1] for number in range(1, ROUNDS + 1))
    assert {len(group) for group in odd} == {1}
    assert chisquare([odd[(name,)] for name in NAMES[:5]]).pvalue > 0.01

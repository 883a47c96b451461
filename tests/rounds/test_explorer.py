"""The rule holds in every order of steps; and the explorer sees what would happen without each part of it."""

from __future__ import annotations

import pytest
from rounds.explorer import WITNESS, Budget, Explorer, Fork, Rule

TWO, THREE = ("ab", "ab"), ("abc", "abc")
JOINING = ("abc", "ab")
"""Two members, and a third site that is none yet."""


@pytest.mark.parametrize(
    ("sites", "rounds", "budget"),
    [
        (TWO, 2, Budget(3, crashes=2)),
        (TWO, 2, Budget(2, crashes=1, stops=1, losses=1)),
        (TWO, 3, Budget(3, crashes=1)),
        (THREE, 1, Budget(2, crashes=1)),
        (THREE, 1, Budget(1, crashes=1, stops=1, losses=1)),
        (JOINING, 1, Budget(2, crashes=1)),
    ],
    ids=str,
)
def test_one_result_of_each_round(sites: tuple[str, str], rounds: int, budget: Budget) -> None:
    assert Explorer(*sites, rounds, budget).run() > 500


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sites", "rounds", "budget"),
    [
        (TWO, 1, Budget(3, crashes=2, stops=1)),
        (TWO, 2, Budget(4, crashes=2, stops=1)),
        (TWO, 3, Budget(4, crashes=2)),
        (TWO, 2, Budget(3, crashes=2, stops=1, losses=1)),
        (THREE, 1, Budget(3, crashes=1)),
        (THREE, 2, Budget(3, crashes=1)),
        (THREE, 2, Budget(2, crashes=1, stops=1)),
        (JOINING, 2, Budget(3, crashes=1)),
    ],
    ids=str,
)
def test_one_result_of_each_round_further_out(sites: tuple[str, str], rounds: int, budget: Budget) -> None:
    assert Explorer(*sites, rounds, budget).run() > 10_000


@pytest.mark.parametrize(
    ("sites", "rounds", "budget"),
    [
        (TWO, 2, Budget(3, crashes=1)),
        pytest.param(TWO, 1, Budget(3, crashes=2), marks=pytest.mark.thorough),
        pytest.param(TWO, 2, Budget(2, crashes=1, stops=1, losses=1), marks=pytest.mark.thorough),
        pytest.param(TWO, 2, Budget(3, crashes=2, stops=1), marks=pytest.mark.thorough),
        pytest.param(JOINING, 1, Budget(2, crashes=1, stops=1), marks=pytest.mark.thorough),
        pytest.param(("abcd", "abcd"), 1, Budget(2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_one_result_of_each_round_with_a_witness(sites: tuple[str, str], rounds: int, budget: Budget) -> None:
    assert Explorer(*sites, rounds, budget, witness=WITNESS).run() > 500


def test_a_witness_that_forgets_its_vote_makes_a_fork() -> None:
    with pytest.raises(Fork):
        Explorer(*TWO, 1, Budget(2), Rule(witness_remembers=False), WITNESS).run()


@pytest.mark.parametrize(
    ("rule", "sites", "rounds", "budget"),
    [
        (Rule(keeps_what_it_fetches=False, remembers_what_it_committed=False), TWO, 2, Budget(2, crashes=2)),
        (Rule(remembers_given_votes=False), TWO, 1, Budget(2, stops=1)),
        (Rule(remembers_votes=False), TWO, 1, Budget(2, crashes=1)),
        (Rule(adopts=False), TWO, 1, Budget(2)),
        pytest.param(Rule(remembers_promises=False), JOINING, 1, Budget(3, crashes=1), marks=pytest.mark.thorough),
    ],
    ids=[
        "a fetched state is lost",
        "a given vote comes back",
        "a vote is forgotten",
        "nothing is finished",
        "promises",
    ],
)
def test_without_a_part_of_the_rule_there_is_a_fork(
    rule: Rule, sites: tuple[str, str], rounds: int, budget: Budget
) -> None:
    """Each of these budgets is within one of those above, with which the whole rule has none."""
    with pytest.raises(Fork):
        Explorer(*sites, rounds, budget, rule).run()

"""An evaluation: what is asked, what is taken, what is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator.expert_cases import WEIGHTS, sheet

from pier_coordinator.experts.scoring import ScoredExpert, Scoring, scoring_id
from pier_coordinator.store.refusals import Refused
from pier_node.experts.config import DomainSection
from pier_node.experts.sheet import ScoredDomain, load_sheet

ID, ALICE, BOB = "ab" * 16, "alice", "bob"
ONE, OTHER = "01" * 16, "02" * 16
DOMAINS = [ScoredDomain(section=DomainSection(name=name)) for name in ("topics", "network")]


def scoring(folder: Path, rows: int = 0) -> Scoring:
    """Alice has the expert of topics, bob trains that of network."""
    made = Scoring(ID, [ScoredExpert("topics", ""), ScoredExpert("network", "")], DOMAINS, rows, 60.0, folder)
    made.done("topics", ALICE, ONE, WEIGHTS, 0.0)
    made.done("network", BOB, "", "", 0.0)
    made.begin(0.0)
    return made


def give(to: Scoring, node: str, name: str, expert: str, **more: Any) -> None:
    for domain in ("topics", "network"):
        for split in ("prior", "test"):
            to.take(node, name, sheet(expert, domain, split, **more).packed(), 1.0)


def test_a_site_is_asked_for_what_is_done_there(tmp_path: Path) -> None:
    made = scoring(tmp_path, rows=20)
    order = made.order(ALICE)
    assert order is not None
    assert (order.id, order.experts, order.rows) == (ID, (ONE,), 20)
    assert [each.section.name for each in order.domains] == ["topics", "network"]
    assert made.order(BOB) is None
    made.done("network", BOB, OTHER, "", 0.0)
    assert made.order(BOB) is not None


def test_it_is_finished_when_all_sheets_are_there(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    give(made, ALICE, ONE, "topics")
    assert not made.finished
    assert made.order(ALICE) is None, "it has scored"
    made.done("network", BOB, OTHER, "", 0.0)
    give(made, BOB, OTHER, "network", weights="ef" * 32)
    assert made.finished
    assert len([load_sheet(path) for path in tmp_path.iterdir()]) == 8
    told = made.told(lambda _: True, str.upper)
    assert told["experts"][1] == {
        "domain": "network",
        "site": "BOB",
        "there": True,
        "trained": True,
        "sheets": 4,
        "of": 4,
        "problem": "",
    }


@pytest.mark.parametrize(
    ("node", "name", "content", "said"),
    [
        (BOB, ONE, sheet("topics", "topics"), "was not asked to score that expert"),
        (ALICE, OTHER, sheet("topics", "topics"), "was not asked to score that expert"),
        (ALICE, ONE, sheet("network", "topics"), "a sheet of network on the test split of topics was not asked for"),
        (ALICE, ONE, sheet("topics", "numbers"), "was not asked for"),
        (ALICE, ONE, sheet("topics", "topics", "dev"), "dev split of topics was not asked for"),
        (ALICE, ONE, sheet("topics", "topics", weights="00" * 32), "of other weights"),
        (ALICE, ONE, sheet("topics", "topics", rows=9), "9 rows: 5 were asked for"),
        (ALICE, ONE, b"\x80\x04pickle", "not a score sheet"),
    ],
)
def test_what_was_not_asked_for_or_is_not_what_it_says_is_refused(
    tmp_path: Path, node: str, name: str, content: Any, said: str
) -> None:
    made = scoring(tmp_path, rows=5)
    with pytest.raises(Refused, match=said):
        made.take(node, name, content if isinstance(content, bytes) else content.packed(), 1.0)
    assert not list(tmp_path.iterdir())


def test_a_sheet_that_comes_again_is_taken_as_it_is(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    for _ in range(2):  # the answer to the first one got lost
        made.take(ALICE, ONE, sheet("topics", "topics").packed(), 1.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_probability_is_refused(tmp_path: Path) -> None:
    bad = sheet("topics", "topics")
    bad.log_probs[1, 1] = np.nan
    with pytest.raises(Refused, match="above 0 or no number"):
        scoring(tmp_path).take(ALICE, ONE, bad.packed(), 1.0)


def test_a_second_evaluation_takes_what_the_first_has_left(tmp_path: Path) -> None:
    give(scoring(tmp_path), ALICE, ONE, "topics")
    (tmp_path / "broken.scores.safetensors").write_bytes(b"torn")
    again = scoring(tmp_path)
    assert again.order(ALICE) is None
    assert [row["sheets"] for row in again.told(lambda _: True, str)["experts"]] == [4, 0]
    other = Scoring(ID, [ScoredExpert("topics", ALICE, ONE, "77" * 32)], DOMAINS, 0, 60.0, tmp_path)
    other.begin(0.0)
    assert other.order(ALICE) is not None, "those sheets are of other weights"


def test_an_expert_of_which_nothing_comes_is_given_up_one_in_training_is_not(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    assert not made.look(59.0, lambda _: True, str)
    made.take(ALICE, ONE, sheet("topics", "topics").packed(), 50.0)
    assert not made.look(109.0, lambda _: True, str)
    assert made.look(110.0, lambda node: node == BOB, str)
    assert [expert.problem for expert in made.experts] == ["alice: is not there for 60 s", ""]
    assert not made.finished, "bob trains"
    made.look(170.0, lambda _: False, str)
    assert made.experts[1].problem == "bob: is not there for 60 s", "nor trains a site that is lost"
    assert made.finished
    assert made.order(ALICE) is None


def test_what_a_site_has_that_was_put_out_is_not_waited_for(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    assert made.look(1.0, lambda _: True, str, [ALICE])
    assert made.experts[0].problem == "alice is not of the run any more"


def test_what_no_site_can_train_is_not_waited_for(tmp_path: Path) -> None:
    made = scoring(tmp_path)
    made.done("network", "", "", "", 0.0)
    assert made.look(1.0, lambda _: True, str)
    assert made.experts[1].problem == "no site can train it"


def test_a_domain_that_a_site_has_no_text_of_is_left_out_and_an_expert_it_cannot_read_is_missing(
    tmp_path: Path,
) -> None:
    made = scoring(tmp_path)
    made.cannot(ALICE, ONE, "network", "no such file", 1.0)
    assert made.left_out == {"network": "the expert of topics is not scored on it: no such file"}
    assert made.experts[0].wanted == {("topics", "prior"), ("topics", "test")}
    made.cannot(ALICE, ONE, "", "not its weights", 1.0)
    assert made.experts[0].problem == "not its weights"
    with pytest.raises(Refused):
        made.cannot(BOB, ONE, "", "nor this", 1.0)


def test_the_same_question_has_the_same_name() -> None:
    assert scoring_id("plan", 1.0, ["a"], 0) == scoring_id("plan", 1.0, ["a"], 0)
    assert scoring_id("plan", 1.0, ["a"], 0) != scoring_id("plan", 1.0, ["a"], 5)

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, problem

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import plan_from_dict, plan_to_dict, problem_from_json, problem_to_json
from pier_node.pipeline.planning.start import random_plan


def test_there_and_back() -> None:
    it = problem(max_intra_s=2.0, uplink_s=(0.1,) * 6)
    assert problem_from_json(problem_to_json(it)) == it
    plan = random_plan(it, 1)
    said = json.loads(json.dumps(plan_to_dict(it, plan)))
    assert said["waves"][0][0][0] in said["stages"][0]
    assert plan_from_dict(it, said) == plan


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("stages", 3, "a key that means nothing: stages\nThere are: sites, transfer_s"),
        ("path_length", "two", "path_length: Input should be a valid integer"),
        ("sites", [{"name": "a"}], r"sites\.0\.forward_s: Field required"),
        ("microbatches", 0, "0 microbatches"),
        ("rules", {"max_hops": 1}, "means nothing: rules.max_hops"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    body = json.loads(problem_to_json(problem())) | {key: value}
    with pytest.raises(PierError, match=said):
        problem_from_json(json.dumps(body))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"sites": 1}', b"\xff\xfe"])
def test_what_is_no_problem(text: str | bytes) -> None:
    with pytest.raises(PierError, match="the problem cannot be read"):
        problem_from_json(text)


@SOME
@given(st.recursive(st.none() | st.integers() | st.text(), lambda it: st.lists(it) | st.dictionaries(st.text(), it)))
def test_noise_is_refused_in_words(body: object) -> None:
    with pytest.raises(PierError):
        problem_from_json(json.dumps(body))


@pytest.mark.parametrize("body", [{}, {"stages": 1, "waves": []}, {"stages": [["nobody"]], "waves": []}])
def test_a_plan_for_others(body: dict[str, object]) -> None:
    with pytest.raises(PierError, match="no plan for these sites"):
        plan_from_dict(problem(), body)

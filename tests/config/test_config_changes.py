from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pier_node.config.run import RunConfig, config_changes

TABLES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
)


def test_each_key_with_both_values() -> None:
    before, now = RunConfig(), RunConfig.model_validate({"run": {"name": "other"}, "inner": {"total_steps": 9}})
    said = config_changes(before.canonical(), now.canonical())
    assert f"inner.total_steps was {before.inner.total_steps}, is 9" in said
    assert f'run.name was "{before.run.name}", is "other"' in said


def test_of_many_only_some_are_named() -> None:
    before, now = ({f"k{key}": value for key in range(5)} for value in (1, 2))
    assert config_changes(json.dumps(before), json.dumps(now)) == (
        "k0 was 1, is 2, k1 was 1, is 2, k2 was 1, is 2, and 2 more"
    )


def test_a_key_that_one_of_them_does_not_have() -> None:
    assert (
        config_changes('{"a": {"b": 1}}', '{"a": {"c": [2]}}') == "a.b was 1, is not there, a.c was not there, is [2]"
    )


@given(TABLES, TABLES)
def test_nothing_is_said_of_what_is_equal_and_something_of_the_rest(one: object, other: object) -> None:
    assert bool(config_changes(json.dumps(one), json.dumps(other))) == (one != other)

"""[program]: what of a program's model belongs to the run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pier_node.config.program import ProgramSection, described, first_difference
from pier_node.config.run import RunConfig, from_canonical
from pier_node.outer.layout import Layout
from pier_node.outer.mean import weighing

PROGRAM: dict[str, Any] = {"step_tokens": 100, "tensors": ["a.weight 3x4", "scale ", "b 5"]}
SHAPES = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=20),
        st.lists(st.integers(1, 10**9), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@given(SHAPES)
def test_names_and_shapes_come_back(shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    section = ProgramSection(step_tokens=1, tensors=described(shapes))
    assert [*section.shapes()] == shapes
    assert first_difference(section.tensors, described(shapes)) == ""


def test_the_first_difference_is_named() -> None:
    ours = described([("a", (2, 3)), ("b", (4,))])
    theirs = described([("a", (2, 3)), ("b", (5,))])
    assert first_difference(ours, theirs) == "parameter 2 is b [4] here and b [5] in the run"
    assert first_difference(ours, ours[:1]) == "the model here has 2 trained parameters, that of the run 1"


def test_it_is_part_of_the_hash_and_survives_the_way_to_a_peer() -> None:
    config = RunConfig.model_validate({"program": PROGRAM})
    assert from_canonical(config.canonical()) == config
    other = {**PROGRAM, "tensors": ["a.weight 4x3", *PROGRAM["tensors"][1:]]}
    assert RunConfig.model_validate({"program": other}).hash() != config.hash()


def test_runs_without_a_program_have_the_hash_that_they_had() -> None:
    assert '"program"' not in RunConfig().canonical()


def test_its_layout_and_its_tokens_are_the_run_s() -> None:
    config = RunConfig.model_validate({"program": PROGRAM, "outer": {"algorithm": "diloco", "inner_steps": 10}})
    layout = Layout.of_run(config)
    assert layout.length == 12 + 1 + 5
    assert [(entry.name, entry.offset) for entry in layout.entries] == [("a.weight", 0), ("scale", 12), ("b", 13)]
    assert weighing(config, 1).whole == 10 * 100


def test_it_starts_without_a_start() -> None:
    assert RunConfig.model_validate({"program": PROGRAM}).outer.start == "none"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"outer": {"start": "solo", "start_fraction": 0.1}}, r'write start = "none" in \[outer\]'),
        ({"outer": {"algorithm": "sync"}}, "is for Pier's own trainer"),
        ({"run": {"sites": 2}, "pipeline": {"stages": 2}}, "Pier's own trainer"),
        ({"program": {"step_tokens": 1, "tensors": []}}, "at least 1 item"),
        ({"program": {"step_tokens": 1, "tensors": ["a 0x2"]}}, "pattern"),
    ],
)
def test_what_a_program_cannot_do_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunConfig.model_validate({"program": PROGRAM, **tables})

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.store.facts import LONGEST, amount, number, text, whole

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda it: st.lists(it), max_leaves=5
)


@given(ANYTHING)
def test_whatever_a_field_holds_reading_it_is_no_error(value: Any) -> None:
    body = {"it": value}
    assert number(body, "it") is None or isinstance(number(body, "it"), float)
    assert (whole(body, "it") or 0) >= 0
    assert amount(body, "it") >= 0
    assert text(body, "it").isprintable()
    assert len(text(body, "it")) <= LONGEST


@pytest.mark.parametrize("value", [None, True, "7", [], float("nan"), float("inf"), 1e30, 10**400])
def test_what_is_no_number_is_not_known(value: Any) -> None:
    assert number({"it": value}, "it") is None


def test_numbers_and_texts_are_read() -> None:
    assert number({"it": -2}, "it") == -2.0
    assert whole({"it": 7.9}, "it") == 7
    assert whole({"it": -1}, "it") is None
    assert amount({}, "it") == 0.0
    assert text({"it": "two\nlines\x1b[31m"}, "it") == "two lines [31m"

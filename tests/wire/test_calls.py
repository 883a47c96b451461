from __future__ import annotations

from contextlib import ExitStack

import pytest

from pier_node.wire.links import CALLS_PER_PEER, Answers, Busy


def test_a_peer_has_so_many_places_and_no_other_peer_loses_one() -> None:
    calls = Answers()
    with ExitStack() as stack:
        for _ in range(CALLS_PER_PEER):
            stack.enter_context(calls.place("alice"))
        with pytest.raises(Busy, match="64 calls of alice are under way already"), calls.place("alice"):
            pass
        with calls.place("bob"):
            pass
    with calls.place("alice"):
        pass


def test_a_call_that_fails_gives_its_place_back() -> None:
    calls = Answers()
    for _ in range(CALLS_PER_PEER + 1):
        with pytest.raises(ZeroDivisionError), calls.place("alice"):
            raise ZeroDivisionError

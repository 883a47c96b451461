from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pier_node.experts.serving.answer import Telling, Token

TEXTS = st.text("ab", max_size=3)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first(text: str, stops: list[str]) -> int:
    return min([at for stop in stops if (at := text.find(stop)) >= 0], default=-1)


@given(pieces=st.lists(TEXTS, max_size=12), stops=STOPS)
def test_what_is_told_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    telling, told, made = Telling(stops), "", ""
    for piece in pieces:
        made += piece
        told += "".join(token.text for token in telling.push(Token(piece)))
        if telling.stopped:
            break
        assert made.startswith(told)
        assert first(made, stops) < 0
    cut = first(made, stops)
    assert telling.stopped == (cut >= 0)
    told += "".join(token.text for token in telling.end())
    assert told == (made if cut < 0 else made[:cut])


@given(pieces=st.lists(TEXTS, max_size=12))
def test_without_stops_every_token_is_told_at_once(pieces: list[str]) -> None:
    telling = Telling()
    assert all(telling.push(Token(piece)) == [Token(piece)] for piece in pieces)
    assert telling.end() == []


def test_only_what_may_become_a_stop_is_held() -> None:
    telling = Telling(["end."])
    assert [token.text for token in telling.push(Token("the "))] == ["the "]
    assert telling.push(Token("en")) == []
    assert [token.text for token in telling.push(Token("t"))] == ["en", "t"]


def test_a_token_in_which_a_stop_begins_is_cut_and_keeps_what_it_was() -> None:
    telling = Telling(["\n"])
    assert telling.push(Token("a\nb", -1.5, {"x": -1.0}, {"topics": 1.0})) == [
        Token("a", -1.5, {"x": -1.0}, {"topics": 1.0})
    ]
    assert telling.stopped

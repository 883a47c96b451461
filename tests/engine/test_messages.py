from __future__ import annotations

import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.engine.messages import (
    LINE_LIMIT,
    NAME,
    WORDS,
    Evaluated,
    Failed,
    Logged,
    Message,
    Progress,
    decode,
    encode,
)

NAMES = st.from_regex(NAME, fullmatch=True).filter(lambda name: not name.endswith("\n"))
METRICS = st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=WORDS), max_size=8)
MESSAGES = st.one_of(
    [st.from_type(kind) for kind in get_args(Message) if kind is not Logged]
    + [st.builds(Logged, step=st.integers(), metrics=METRICS)]
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert repr(decode(line)) == repr(message)  # NaN is not equal to itself


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_survives_too(loss: float) -> None:
    read = decode(encode(Progress(1, loss, 2, 0.5)))
    assert isinstance(read, Progress)
    assert str(read.loss) == str(loss)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\n",
        b"[]\n",
        b"3\n",
        b"{}\n",
        b'{"kind": "Nothing"}\n',
        b'{"kind": "Evaluated", "id": 1}\n',
        b'{"kind": "Evaluated", "id": "1", "loss": 2.0}\n',
        b'{"kind": "Evaluated", "id": true, "loss": 2.0}\n',
        b'{"kind": "Evaluated", "id": 1, "loss": 2.0, "more": 3}\n',
        b'{"kind": ["Evaluated"], "id": 1, "loss": 2.0}\n',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(PierError, match="no message"):
        decode(line)


def test_the_form_is_plain_json() -> None:
    assert json.loads(encode(Evaluated(7, 1.5))) == {"kind": "Evaluated", "id": 7, "loss": 1.5}


def test_lines_are_bounded() -> None:
    with pytest.raises(PierError, match="longer than a line"):
        encode(Failed("x" * LINE_LIMIT, ""))

"""Log lines: coloured on a terminal, elsewhere one line each however long they are, or JSON."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from rich.console import Console

from pier_node.base.log import log_to

LONG = "round 7 committed by 3: " + "step 350 of 5,000, " * 10


def shown(quiet: bool = False, as_json: bool = False, terminal: bool = False) -> list[str]:
    out, root = io.StringIO(), logging.getLogger()
    before = root.handlers, root.level
    root.handlers = []  # as in a process of its own
    try:
        say = log_to(Console(file=out, width=80, force_terminal=terminal), quiet, as_json)
        logging.getLogger("pier_node.site").info("%s", LONG)
        say(f"pier-node start {'--option ' * 12}")
        logging.getLogger("pier_node.site").warning("the disk is full")
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])
    return out.getvalue().splitlines()


def test_a_file_has_a_line_for_each_whatever_its_length() -> None:
    first, said, last = shown()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO     " + LONG, first)
    assert said.startswith("pier-node start --option")
    assert re.search(r" WARN(ING)? +the disk is full$", last), "hivemind has a shorter name for the level"


def test_a_terminal_is_not_overrun() -> None:
    assert len(shown(terminal=True)) > 4


def test_json_has_everything_a_collector_wants() -> None:
    first, said, last = map(json.loads, shown(as_json=True))
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "pier_node.site", LONG)
    assert said["message"].startswith("pier-node start --option"), "news that are no log lines too"
    assert last["level"] == "WARNING"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", last["time"])


def test_an_address_or_a_path_with_brackets_is_no_markup() -> None:
    out = io.StringIO()
    say = log_to(Console(file=out, width=80), quiet=False)
    say("pier-node start --peers [fd00::5]:7700 --data /srv/[/x]")
    assert out.getvalue() == "pier-node start --peers [fd00::5]:7700 --data /srv/[/x]\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_quiet_leaves_warnings(as_json: bool) -> None:
    (only,) = shown(quiet=True, as_json=as_json)
    assert "the disk is full" in only

from __future__ import annotations

import io
from pathlib import Path

from demo.seen import record
from rich.console import Console

from pier_node.demo.picture import LINE_SECONDS, screen_on


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path: Path) -> None:
    output, seen = io.StringIO(), record(tmp_path, rounds=3)
    with screen_on(Console(file=output, width=40)) as screen:
        for seconds in (0.0, 1.0, LINE_SECONDS - 0.1, LINE_SECONDS, LINE_SECONDS + 1):
            screen.show(seen, seconds)
        screen.tell("[beta] is gone")
    lines = output.getvalue().splitlines()
    assert [line[:6] for line in lines] == ["[0:00]", "[0:05]", "[beta]"]
    assert "\x1b" not in output.getvalue()


def test_a_live_picture_in_a_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, height=40, _environ={"TERM": "xterm"})
    with screen_on(console) as screen:
        screen.show(record(tmp_path, rounds=3), 1.0)
        screen.tell("beta is gone")
        screen.show(record(tmp_path, rounds=4), 2.0)
    assert output.getvalue().count("Ctrl+C ends everything") >= 2
    assert "beta is gone" in output.getvalue()
    assert "\x1b[2K" in output.getvalue()

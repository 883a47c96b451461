from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from processes.run import Run
from rich.console import Console

from bench.ports import free_port
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict, as_fields, show

Call = Callable[..., Result]

FINE = [
    Finding(THIS_SITE, "disk", Verdict.OK, "checkpoints need 60 MB in pier-data; 83 GB free"),
    Finding(
        "beta", "reach it", Verdict.OK, "answers at 10.0.0.2:7700, 42 ms away", values={"round_trip_seconds": 0.042}
    ),
]
BLOCKED = [
    Finding(name, "reached by it", Verdict.PROBLEM, "connection refused: nothing listens there", "Open TCP port 7700.")
    for name in ("beta", "gamma")
]
SLOW = Finding(THIS_SITE, "utilisation", Verdict.ADVICE, "70 % expected", "Raise outer.inner_steps to H = 890.")


def shown(findings: Sequence[Finding], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(findings, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_is_well() -> None:
    lines = shown(FINE).splitlines()
    assert lines[0].split() == ["site", "check", "verdict", "what", "was", "seen"]
    assert lines[1].split()[:4] == ["this", "site", "disk", "ok"]
    assert lines[-1] == "Nothing is wrong."


def test_what_to_change_is_said_once_for_all_it_concerns() -> None:
    text = shown([*FINE, *BLOCKED])
    assert text.count("PROBLEM") == 3
    assert "1. beta, gamma: reached by it: PROBLEM\n   Open TCP port 7700." in text
    assert text.count("Open TCP port") == 1
    assert "2 problems: change what is said above and ask again." in text


def test_advice_is_no_problem() -> None:
    text = shown([*FINE, SLOW])
    assert "1. this site: utilisation: advice" in text
    assert "Nothing is wrong; it could be better." in text
    assert as_fields([*FINE, SLOW])["ok"] is True


@pytest.mark.parametrize("width", [80, 120])
def test_it_keeps_to_the_width_of_the_terminal(width: int) -> None:
    long = [Finding("x" * 40, "reach it", Verdict.PROBLEM, "y " * 90, "z " * 90)]
    assert max(len(line.rstrip()) for line in shown(long, width).splitlines()) <= width


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    odd = [Finding("[red]", "reach it", Verdict.PROBLEM, "at [fd00::5]:7700", "Try [fd00::6]:7700.")]
    assert all(part in shown(odd) for part in ("[red]", "[fd00::5]:7700", "[fd00::6]:7700"))


def test_programs_read_the_same() -> None:
    fields = as_fields([*FINE, *BLOCKED])
    assert fields["ok"] is False
    assert fields["findings"][1] == {
        "site": "beta",
        "check": "reach it",
        "verdict": "ok",
        "detail": "answers at 10.0.0.2:7700, 42 ms away",
        "remedy": "",
        "values": {"round_trip_seconds": 0.042},
    }
    assert fields["findings"][2]["verdict"] == "problem"


def test_it_does_not_begin_without_a_run(call: Call, tmp_path: Path) -> None:
    failed = call("doctor", "--data", tmp_path)
    assert failed.exit_code == 1
    assert "does not know which run" in failed.output


def test_it_finds_the_run_toml_here_as_start_does(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init", "--preset", "llama-tiny").exit_code == 0
    done = call("doctor", "--listen", f"127.0.0.1:{free_port()}")
    assert done.exit_code == 0, done.output
    assert "Nothing is wrong" in done.output


@pytest.mark.processes
def test_two_sites_that_train(call: Call, run: Run) -> None:
    alpha, beta = run.sites
    done = call("doctor", "--data", beta.folder, "--json")
    report = json.loads(done.stdout)
    by_name = {(line["site"], line["check"]): line for line in report["findings"]}
    for check in ("reach it", "reached by it", "link", "clock"):
        assert by_name["alpha", check]["verdict"] == "ok"
    assert by_name["this site", "address"]["detail"].endswith(beta.address)
    assert by_name["this site", "memory"]["values"]["bytes_per_parameter"] == 36
    assert 0 < by_name["this site", "utilisation"]["values"]["utilisation"] <= 1
    assert (done.exit_code, report["ok"]) == (0, True)
    assert alpha.running
    assert beta.running


@pytest.mark.processes
def test_a_newcomer_to_them_whose_port_is_closed(call: Call, run: Run, tmp_path: Path) -> None:
    alpha, listen, closed = run.sites[0], f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    words = ["--data", tmp_path / "new", "--peers", alpha.address, "--token", run.token, "--listen", listen]
    done = call("doctor", *words)
    assert done.exit_code == 0, done.output
    assert "Nothing is wrong" in done.output
    failed = call("doctor", *words, "--advertise", closed)
    assert failed.exit_code == 1
    assert "1. alpha, beta: reached by it: PROBLEM" in failed.output
    nodes = {peer["node"] for peer in alpha.status()["peers"]}
    assert nodes == {run.sites[1].node}, "who only looked is not in the roster"

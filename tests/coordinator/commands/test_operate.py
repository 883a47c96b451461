"""The commands that ask a coordinator, with a coordinator that answers as it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pier_coordinator.commands import operate
from pier_node.base.errors import PierError

Answer = dict[str, Any]
FOLDER = Path("my-run")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What it answers, by path or action."""
    told: dict[str, Answer] = {}

    class Client:
        @classmethod
        def of(cls, _folder: Path) -> Client:
            return cls()

        def get(self, path: str) -> Answer:
            return told[path]

        def act(self, action: str, **_body: Any) -> Answer:
            return told[action]

    monkeypatch.setattr(operate, "Client", Client)
    return told


def test_what_sites_are_called_is_no_markup(answers: dict[str, Answer], capsys: pytest.CaptureFixture[str]) -> None:
    site = {"name": "[/a]", "node": "ab" * 8, "state": "training", "address": "[fd00::5]:7700", "version": "[/b]"}
    answers["/api/nodes"] = {"sites": [site]}
    event = {"time": 0.0, "name": "[/a]", "text": "started", "level": 20, "kind": "site"}
    answers["/api/events?limit=500"] = {"events": [event]}
    operate.nodes(FOLDER, as_json=False)
    operate.events(FOLDER, as_json=False, limit=5, of_sites=False)
    shown = capsys.readouterr().out
    assert all(it in shown for it in ("[/a]", "[fd00::5]:7700", "[/b]")), shown


def test_a_revoked_site_is_out(answers: dict[str, Answer], capsys: pytest.CaptureFixture[str]) -> None:
    answers["revoke"] = {"site": "lab-b", "invite": "", "sites": []}
    operate.revoke(FOLDER, "lab-b", as_json=False)
    said = capsys.readouterr().out
    assert "lab-b is revoked" in said
    assert "invite" not in said


def test_with_a_site_the_invite_of_many_ends_and_it_is_said(
    answers: dict[str, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["revoke"] = {"site": "lab-b", "invite": "5d1f", "sites": ["lab-c"]}
    operate.revoke(FOLDER, "lab-b", as_json=False)
    said = capsys.readouterr().out
    assert "Its invite 5d1f had uses left and is taken back with it" in said
    assert "  pier-coordinator revoke --data my-run lab-c\n" in said


def test_a_command_can_be_copied_whatever_names_have_spaces(
    answers: dict[str, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["revoke"] = {"invite": "5d1f", "sites": ["lab c"]}
    operate.revoke(Path("my run"), "5d1f", as_json=False)
    assert "  pier-coordinator revoke --data 'my run' 'lab c'\n" in capsys.readouterr().out


@pytest.mark.parametrize("sites", [[], ["lab-b", "lab-c"]])
def test_who_came_with_a_revoked_invite_stays(
    answers: dict[str, Answer], capsys: pytest.CaptureFixture[str], sites: list[str]
) -> None:
    answers["revoke"] = {"invite": "5d1f", "sites": sites}
    operate.revoke(FOLDER, "5d1f", as_json=False)
    said = capsys.readouterr().out
    assert "The invite 5d1f is taken back" in said
    assert ("stay" in said) is bool(sites)
    assert [line for line in said.splitlines() if line.startswith("  ")] == [
        f"  pier-coordinator revoke --data my-run {name}" for name in sites
    ]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("states", "code"), [((), 0), (("training", "left", "revoked", "paused"), 0), (("training", "silent"), 3)]
)
def test_scripts_see_by_the_exit_code_that_a_site_is_silent(
    answers: dict[str, Answer], states: tuple[str, ...], code: int, as_json: bool
) -> None:
    sites = [
        {"name": state, "node": state, "state": state, "address": "", "version": "", "activity": ""}
        | dict.fromkeys(("round", "loss", "tokens_per_second", "bytes_sent"))
        for state in states
    ]
    run = {"name": "lark", "algorithm": "pier", "rounds": 20}
    totals = {"round": 7, "tokens_per_second": 1234.0, "loss": 2.5, "alive": 2, "paused": 0}
    answers["/api/nodes"] = {"sites": sites}
    answers["/api/board"] = {"sites": sites, "run": run, "totals": totals, "alerts": []}
    assert operate.nodes(FOLDER, as_json) == code
    assert operate.status(FOLDER, as_json, watch=False) == code


def test_an_invite_is_no_part_of_the_command(answers: dict[str, Answer], capsys: pytest.CaptureFixture[str]) -> None:
    command = "pier-node start --coordinator host:7790 --name lab-b"
    answers["invite"] = {"id": "5d1f", "token": "pierinvite1-x", "command": command, "expires": 0.0}
    operate.invite(FOLDER, False, None, name="lab-b", expires_seconds=60.0, uses=1)
    said = capsys.readouterr().out
    assert f"\n  {command}\n" in said
    assert "\n  pierinvite1-x\n" in said


def test_an_invites_token_can_go_to_a_file_that_others_cannot_read(
    answers: dict[str, Answer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = "pier-node start --coordinator host:7790 --name lab-b"
    answers["invite"] = {"id": "5d1f", "token": "pierinvite1-x", "command": command, "expires": 0.0}
    wanted: dict[str, Any] = {"name": "lab-b", "expires_seconds": 60.0, "uses": 1}
    file = tmp_path / "lab-b.token"
    for as_json in (False, True):
        operate.invite(FOLDER, as_json, file, **wanted)
        said = capsys.readouterr().out
        assert f"{command} --token-file lab-b.token" in said
        assert "pierinvite1-x" not in said
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("pierinvite1-x\n", 0o600)
    (tmp_path / "file").write_text("")
    with pytest.raises(PierError, match="Revoke invite 5d1f"):
        operate.invite(FOLDER, False, tmp_path / "file" / "lab-b.token", **wanted)

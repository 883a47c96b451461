"""A site's part in an evaluation; how it scores is played here, and tested in experts/test_scoring.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.experts.config import DomainSection
from pier_node.experts.scoring import Said
from pier_node.experts.sheet import ScoredDomain, ScoringOrder
from pier_node.site import experts
from pier_node.site.coordinator.link import Refused
from pier_node.site.experts import ExpertScoring
from pier_proto.v1.coordinator_pb2 import ScoreSheet

ONE, OTHER = "01" * 16, "02" * 16
ORDER = ScoringOrder(id="ab" * 16, experts=(ONE, OTHER), domains=(ScoredDomain(section=DomainSection(name="topics")),))


class Coordinator:
    def __init__(self) -> None:
        self.came: list[tuple[str, str, str, bytes]] = []
        self.refuses = ""

    async def deliver(self, sheet: ScoreSheet, content: bytes) -> None:
        if self.refuses == sheet.expert:
            raise Refused("no such evaluation is under way")
        self.came.append((sheet.expert, sheet.domain, sheet.problem, content))


def plays(monkeypatch: pytest.MonkeyPatch, *said: Said, fails: Exception | None = None) -> None:
    async def scored(order: ScoringOrder, folder: Path, out: Path) -> AsyncGenerator[Said]:
        await asyncio.to_thread(out.mkdir)
        await asyncio.to_thread((out / "one").write_bytes, b"sheet")
        for each in said:
            yield Said(each.expert, each.domain, str(out / each.sheet) if each.sheet else "", each.problem)
        if fails:
            raise fails

    monkeypatch.setattr(experts, "scored", scored)


async def test_sheets_are_sent_and_what_cannot_be_scored_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plays(monkeypatch, Said(ONE, "topics", "one"), Said(OTHER, "topics", problem="no text"))
    coordinator = Coordinator()
    scoring = ExpertScoring(tmp_path, coordinator.deliver)
    assert scoring.due(ORDER) == ORDER
    await scoring.run(ORDER)
    assert coordinator.came == [(ONE, "topics", "", b"sheet"), (OTHER, "topics", "no text", b"")]
    assert scoring.due(ORDER) is None
    assert not (tmp_path / "scores").exists()


async def test_an_expert_that_is_done_later_is_scored_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plays(monkeypatch)
    scoring = ExpertScoring(tmp_path, Coordinator().deliver)
    await scoring.run(ORDER.model_copy(update={"experts": (ONE,)}))
    due = scoring.due(ORDER)
    assert due is not None
    assert due.experts == (OTHER,)
    assert scoring.due(None) is None


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PierError("no room", "Make some."), "no room"),
        (OSError("no room"), "no room"),
        (PierError("\x1b[31mno room"), "\ufffd[31mno room"),
    ],
)
async def test_when_nothing_can_be_scored_that_is_told_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, problem: str
) -> None:
    plays(monkeypatch, fails=error)
    coordinator = Coordinator()
    await ExpertScoring(tmp_path, coordinator.deliver).run(ORDER)
    assert coordinator.came == [(ONE, "", problem, b""), (OTHER, "", problem, b"")]


async def test_what_the_coordinator_does_not_want_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plays(monkeypatch, Said(ONE, "topics", "one"), Said(OTHER, "topics", "one"))
    coordinator = Coordinator()
    coordinator.refuses = ONE
    scoring = ExpertScoring(tmp_path, coordinator.deliver)
    await scoring.run(ORDER)
    assert scoring.due(ORDER) is None
    assert [expert for expert, *_ in coordinator.came] == [OTHER]

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import experts_pace
from bench.experts_pace import Took
from pier_node.experts.job import ExpertJob
from pier_node.experts.trainer import Parent, Shop

TWO = ["--steps", "20", "--domains", "topics,numbers", "--preset", "llama-tiny"]


def test_times_follow_from_the_first_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 steps in 5 s and 3 s besides: 20 steps take 13 s, and one took 14.3."""
    found = iter([Took(8.0, 5.0, 1.0), Took(13.0, 10.0, 1.0), Took(14.3, 11.0, 1.0)])
    monkeypatch.setattr(experts_pace, "trained", lambda *_: next(found))
    monkeypatch.setattr(experts_pace, "job", lambda *_: None)
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(experts_pace.main, TWO).output
    rows = [line.split() for line in shown.splitlines()]
    assert rows[2][:4] == ["topics", "20", "13.0", "13.0"]
    assert rows[3] == ["numbers", "20", "13.0", "14.3", "+10.0%", "11.0", "3.3", "1.0"]
    assert "all 26.0 s planned, 27.3 s taken: +5.0%" in shown


@pytest.mark.processes
def test_an_expert_takes_longer_than_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen: list[tuple[ExpertJob, Took]] = []
    real = experts_pace.trained

    def trained(job: ExpertJob, parent: Parent, shop: Shop) -> Took:
        took = real(job, parent, shop)
        seen.append((job, took))
        return took

    monkeypatch.setattr(experts_pace, "trained", trained)
    words = ["--steps", "20", "--domains", "topics", "--preset", "llama-tiny"]
    assert CliRunner().invoke(experts_pace.main, words).exit_code == 0
    assert [job.steps for job, _ in seen] == [10, 20]
    for _, took in seen:
        assert 0 < took.training < took.whole
        assert took.processor > 0

"""Trackers, against the real ones: TensorBoard's files, MLflow's folder, wandb in offline mode."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pier_node.base.errors import PierError
from pier_node.outer.times import Times
from pier_node.rounds.progress import Progress
from pier_node.site import trackers
from pier_node.site.trackers import SITE_FILE, SiteFile, Trackers, Who

WHO = Who("tiny", "site-a", "0123-node-a")


def told(feed: Trackers, rounds: int) -> None:
    for number in range(1, rounds + 1):
        times = Times(waiting=0.25, exchange=0.5)
        progress = Progress(inner_step=10 * number, tokens=80 * number, loss=2.0, validated_round=2, times=times)
        progress.validation_loss = 3.0
        feed.told(progress, {"round": number, "bytes_sent": 1000, "members": ["node-a", "node-b"]})
    feed.close()


def site(folder: Path, text: str) -> Trackers:
    (folder / SITE_FILE).write_text(text)
    return Trackers(SiteFile.of(folder).log, WHO)


def test_tensorboard_has_a_point_a_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told(site(tmp_path, f'[log]\ntensorboard = "{tmp_path}"\n'), 3)
    written = EventAccumulator(str(tmp_path / "tiny-site-a"))
    written.Reload()
    points = {
        name: [(event.step, event.tensor_proto.float_val[0]) for event in written.Tensors(name)]
        for name in written.Tags()["tensors"]
    }
    assert points["loss"] == [(10, 2.0), (20, 2.0), (30, 2.0)]
    assert points["validation_loss"] == [(20, 3.0)]
    assert points["members"][0] == (10, 2.0)
    assert points["exchange_seconds"][0] == (10, 0.5)
    assert points.keys() == {
        *("loss", "validation_loss", "tokens_per_second", "tokens", "round"),
        *("exchange_seconds", "waiting_seconds", "bytes_sent", "members"),
    }


def test_mlflow_has_one_run_for_all_starts_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    for _ in range(2):
        told(site(tmp_path, f'[log]\nmlflow = "{uri}"\n'), 2)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert run.info.run_name == "site-a"
    assert [(it.step, it.value) for it in client.get_metric_history(run.info.run_id, "round")][:2] == [(10, 1), (20, 2)]


def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    told(site(tmp_path, '[log]\nwandb = "a-project"\n'), 2)
    assert [*tmp_path.glob("wandb/offline-run-*/run-*.wandb")]


def test_tensorboard_has_what_the_program_logged_but_for_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed = site(tmp_path, f'[log]\ntensorboard = "{tmp_path}"\n')
    feed.logged({"accuracy": 0.5, "stage": "warm"}, 7)
    feed.close()
    written = EventAccumulator(str(tmp_path / "tiny-site-a"))
    written.Reload()
    assert written.Tags()["tensors"] == ["program/accuracy"]
    assert [event.step for event in written.Tensors("program/accuracy")] == [7]


def test_mlflow_has_what_the_program_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    feed = site(tmp_path, f'[log]\nmlflow = "{uri}"\n')
    feed.logged({"valid/accuracy of: a.b-c": 0.5, "stage": "warm"}, 7)
    feed.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert run.data.metrics == {"program/valid/accuracy of: a.b-c": 0.5}
    assert run.data.tags["program/stage"] == "warm"


def test_without_site_toml_nothing_is_fed(tmp_path: Path) -> None:
    told(Trackers(SiteFile.of(tmp_path).log, WHO), 2)


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="tensorboard, mlflow, wandb"):
        site(tmp_path, '[log]\ntensorbord = "x"\n')


@pytest.fixture
def back_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def becomes(opened: Any) -> None:
        monkeypatch.setitem(trackers.BACK_ENDS, "wandb", opened)

    return becomes


def test_a_tracker_that_fails_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, back_end: Callable[[Any], None]
) -> None:
    points: list[Mapping[str, float]] = []

    def failing(metrics: Mapping[str, float], step: int) -> None:
        points.append(metrics)
        raise OSError("no route to host")

    back_end(lambda where, who: (failing, lambda: None))
    with caplog.at_level(logging.WARNING):
        told(site(tmp_path, '[log]\nwandb = "a-project"\n'), 3)
    assert caplog.text.count("wandb gets no more metrics of this site: no route to host") == 1
    assert len(points) == 1
    assert all(map(math.isfinite, points[0].values()))


def test_what_a_slow_tracker_misses_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, back_end: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    taken, release = threading.Event(), threading.Event()

    def slow(_metrics: Any, _step: int) -> None:
        taken.set()
        release.wait(60)

    back_end(lambda where, who: (slow, lambda: None))
    feed = site(tmp_path, '[log]\nwandb = "a-project"\n')
    with caplog.at_level(logging.WARNING):
        feed.logged({"accuracy": 0.5}, 0)
        assert taken.wait(60), "from here on nothing leaves the queue"
        for step in range(1, trackers.WAITING + 2):
            feed.logged({"accuracy": 0.5}, step)
    assert f"trackers are slow: they miss what was logged at step {trackers.WAITING + 1}" in caplog.text
    release.set()
    feed.close()


def test_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, back_end: Callable[[Any], None]
) -> None:
    def missing(where: str, who: Who) -> Any:
        raise ImportError(name="wandb")

    back_end(missing)
    with caplog.at_level(logging.WARNING):
        told(site(tmp_path, '[log]\nwandb = "a-project"\n'), 1)
    assert "pip install wandb" in caplog.text

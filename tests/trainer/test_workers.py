from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.engine import supervisor
from pier_node.engine.messages import Progress
from pier_node.trainer.data.corpus import SiteData, Windows, open_corpus
from pier_node.trainer.replica import Replica
from pier_node.trainer.worker import WORKER
from pier_node.trainer.workers import Workers

BATCH, CONTEXT = 4, 16
STEPS = 40

Open = Callable[..., Workers]


@pytest.fixture
async def open_workers(config: RunConfig, tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Workers] = []

    def build(count: int = 1, run: RunConfig = config, data_path: str | None = None) -> Workers:
        opened.append(Workers(run, "node-a", SiteData(path=data_path), tmp_path / "node", count))
        return opened[-1]

    yield build
    for workers in opened:
        await workers.stop()


def _processes() -> list[psutil.Process]:
    """The worker processes of this test."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() == WORKER]


def _state(workers: Workers) -> list[Vector]:
    return [vector.array.copy() for vector in (workers.outbox, workers.adam_m, workers.adam_v)]


class Killer:
    """Kills the last worker at the first report of progress."""

    def __init__(self) -> None:
        self.victims: list[psutil.Process] = []

    def __call__(self, progress: Progress) -> None:
        if not self.victims:
            self.victims = _processes()
            self.victims[-1].kill()


async def test_a_killed_worker_costs_nothing_but_time(open_workers: Open, weights: SharedVector) -> None:
    workers = open_workers()
    await workers.start()
    assert workers.team is not None
    assert workers.team.hello.device == "cpu"
    done = await workers.run(0, STEPS, BATCH, "weights", weights)
    assert (done.tokens, workers.adam_step) == (STEPS * BATCH * CONTEXT, STEPS)
    moments = [vector.copy() for vector in (workers.adam_m.array, workers.adam_v.array)]
    weights.array[:] = workers.outbox.array
    await workers.run(STEPS, STEPS, BATCH, "weights", weights)
    expected = _state(workers)

    workers.adam_m.array[:], workers.adam_v.array[:] = moments
    killer = Killer()
    disturbed = await workers.run(STEPS, STEPS, BATCH, "weights", weights, STEPS, on_progress=killer)
    assert disturbed.adam_step == workers.adam_step == 2 * STEPS
    assert _processes() != killer.victims
    assert len(killer.victims) == 1
    assert all(np.array_equal(a, b) for a, b in zip(_state(workers), expected))


async def test_evaluation_does_not_disturb_training(open_workers: Open, weights: SharedVector) -> None:
    workers = open_workers()
    await workers.start()
    untrained = await workers.evaluate(weights)
    await workers.run(0, STEPS, BATCH, "weights", weights)
    assert await workers.evaluate(workers.outbox) < untrained - 0.5
    assert await workers.evaluate(weights) == untrained


async def test_a_job_outlives_a_caller_who_is_cancelled(open_workers: Open, weights: SharedVector) -> None:
    workers = open_workers()
    await workers.start()
    begun = asyncio.Event()
    impatient = asyncio.create_task(
        workers.run(0, STEPS, BATCH, "weights", weights, on_progress=lambda progress: begun.set())
    )
    await begun.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await workers.run(STEPS, 1, BATCH, "gradient", weights)
    assert workers.adam_step == STEPS


async def test_two_workers_do_what_one_does(
    open_workers: Open, configure: Callable[..., RunConfig], weights: SharedVector, tmp_path: Path
) -> None:
    config, batch = configure(micro_batch=2), 5
    windows = Windows(open_corpus(config.data, 0, 1, None, tmp_path / "cache"), CONTEXT, config.run.seed, "node-a")
    alone = Replica(config, torch.device("cpu"), 1)
    alone.load_weights(torch.from_numpy(weights.array))
    gradient, trained = torch.empty(2, alone.layout.length)
    first_loss = alone.gradient(windows.batch(0, batch), batch).item()
    alone.store_gradient(gradient)
    losses = [alone.train(step, windows.batch(step, batch), batch).item() for step in range(5)]
    alone.store_weights(trained)

    workers = open_workers(count=2, run=config)
    await workers.start()
    done = await workers.run(0, 1, batch, "gradient", weights)
    assert done.loss == pytest.approx(first_loss, rel=1e-6)
    torch.testing.assert_close(torch.from_numpy(workers.outbox.array), gradient, rtol=1e-4, atol=1e-6)
    done = await workers.run(0, 5, batch, "weights", weights)
    assert done.loss == pytest.approx(sum(losses) / 5, rel=1e-6)
    torch.testing.assert_close(torch.from_numpy(workers.outbox.array), trained, rtol=0, atol=1e-5)
    validated = alone.evaluate(torch.from_numpy(weights.array), windows.validation(2, BATCH))
    assert await workers.evaluate(weights) == pytest.approx(validated, rel=1e-6)

    workers.adam_m.array[:], workers.adam_v.array[:] = 0.0, 0.0
    await workers.run(0, STEPS, batch, "weights", weights, 0)
    expected, killer = _state(workers), Killer()
    workers.adam_m.array[:], workers.adam_v.array[:] = 0.0, 0.0
    await workers.run(0, STEPS, batch, "weights", weights, 0, on_progress=killer)
    assert len(killer.victims) == 2
    assert all(np.array_equal(a, b) for a, b in zip(_state(workers), expected))


async def test_stopping_leaves_nothing_behind(open_workers: Open, weights: SharedVector) -> None:
    workers, before = open_workers(), psutil.Process().children(recursive=True)
    await workers.start()
    begun = asyncio.Event()
    job = asyncio.create_task(
        workers.run(0, 1_000_000, BATCH, "weights", weights, on_progress=lambda progress: begun.set())
    )
    await begun.wait()
    processes = set(psutil.Process().children(recursive=True)) - set(before)
    assert processes
    words = _processes()[0].cmdline()
    home = Path(words[words.index("--socket") + 1]).parent
    assert home.is_dir()
    await workers.stop()
    assert not any(process.is_running() for process in processes)
    assert not home.exists()
    with pytest.raises(asyncio.CancelledError):
        await job


async def test_bad_data_is_the_callers_error(open_workers: Open, weights: SharedVector, tmp_path: Path) -> None:
    workers = open_workers(data_path=str(tmp_path / "nothing"))
    await workers.start()
    with pytest.raises(PierError, match="nothing"):
        await workers.run(0, 1, BATCH, "weights", weights)


async def test_workers_that_die_too_often_are_given_up(
    open_workers: Open, weights: SharedVector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 0)
    workers = open_workers()
    await workers.start()
    with pytest.raises(PierError, match="cannot be kept running") as caught:
        await workers.run(0, 1_000_000, BATCH, "weights", weights, on_progress=Killer())
    assert str(tmp_path / "node" / "logs" / "workers.log") in caught.value.problem
    assert "worker 0 was killed by SIGKILL" in caught.value.problem


async def test_rows_are_rated_as_the_model_here_rates_them(
    open_workers: Open, weights: SharedVector, replica: Replica, windows: Windows, tmp_path: Path
) -> None:
    inputs, targets = windows.validation(2, 3)[0]
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1).astype(np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    workers = open_workers()
    await workers.start()
    found = await workers.rate(weights, tmp_path / "rows.npy")
    assert found.shape == (3,)
    assert found.tolist() == replica.rate(torch.from_numpy(weights.array), rows, at_once=BATCH).tolist()
    mean = replica.evaluate(torch.from_numpy(weights.array), [(inputs, targets)])
    assert found.mean() == pytest.approx(mean, rel=1e-6)

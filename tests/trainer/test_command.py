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
from pier_node.engine import training_process
from pier_node.engine.messages import SAMPLE, WORDS, Logged, Progress
from pier_node.engine.program import Program
from pier_node.engine.training_process import ENGINE_VARIABLE
from pier_node.trainer.command import Workers, own_trainer
from pier_node.trainer.data.corpus import SiteData, Windows, open_corpus
from pier_node.trainer.replica import Replica
from pier_node.trainer.worker import WORKER

BATCH, CONTEXT = 4, 16
STEPS = 40

Open = Callable[..., Program]


@pytest.fixture
async def open_trainer(config: RunConfig, tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Program] = []

    def build(count: int = 1, run: RunConfig = config, data_path: str | None = None, samples: bool = False) -> Program:
        workers = Workers(count, samples=samples)
        opened.append(own_trainer(run, "node-a", SiteData(path=data_path), tmp_path / "node", workers))
        return opened[-1]

    yield build
    for trainer in opened:
        await trainer.stop()


def _processes() -> list[psutil.Process]:
    """The worker processes of this test."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() == WORKER]


def _state(trainer: Program) -> list[Vector]:
    return [vector.array.copy() for vector in (trainer.outbox, trainer.adam_m, trainer.adam_v)]


def _adam_step(trainer: Program) -> int:
    moments = trainer.moments()
    return moments[2] if moments else 0


class Killer:
    """Kills the last worker at the first report of progress."""

    def __init__(self) -> None:
        self.victims: list[psutil.Process] = []

    def __call__(self, progress: Progress) -> None:
        if not self.victims:
            self.victims = _processes()
            self.victims[-1].kill()


async def test_a_killed_worker_costs_nothing_but_time(open_trainer: Open, weights: SharedVector) -> None:
    trainer = open_trainer()
    await trainer.start()
    done = await trainer.run(0, STEPS, BATCH, "weights", weights)
    assert (done.tokens, _adam_step(trainer)) == (STEPS * BATCH * CONTEXT, STEPS)
    moments = [vector.copy() for vector in (trainer.adam_m.array, trainer.adam_v.array)]
    weights.array[:] = trainer.outbox.array
    await trainer.run(STEPS, STEPS, BATCH, "weights", weights)
    expected = _state(trainer)

    trainer.adam_m.array[:], trainer.adam_v.array[:] = moments
    killer = Killer()
    disturbed = await trainer.run(STEPS, STEPS, BATCH, "weights", weights, STEPS, on_progress=killer)
    assert disturbed.adam_step == _adam_step(trainer) == 2 * STEPS
    assert _processes() != killer.victims
    assert len(killer.victims) == 1
    assert all(np.array_equal(a, b) for a, b in zip(_state(trainer), expected))


@pytest.mark.thorough
async def test_evaluation_does_not_disturb_training(open_trainer: Open, weights: SharedVector) -> None:
    trainer = open_trainer()
    await trainer.start()
    untrained = await trainer.evaluate(weights)
    await trainer.run(0, STEPS, BATCH, "weights", weights)
    assert await trainer.evaluate(trainer.outbox) < untrained - 0.5
    assert await trainer.evaluate(weights) == untrained


@pytest.mark.thorough
async def test_after_an_evaluation_it_logs_what_the_model_writes(open_trainer: Open, weights: SharedVector) -> None:
    logged: list[Logged] = []
    trainer = open_trainer(samples=True)
    trainer.on_log = logged.append
    await trainer.start()
    await trainer.evaluate(weights)
    await trainer.run(0, STEPS, BATCH, "weights", weights)
    await trainer.evaluate(trainer.outbox)
    (after,) = logged
    assert after.step == STEPS, "untrained, it writes nothing"
    assert isinstance(text := after.metrics[SAMPLE], str)
    assert 0 < len(text) <= WORDS


@pytest.mark.thorough
async def test_a_job_outlives_a_caller_who_is_cancelled(open_trainer: Open, weights: SharedVector) -> None:
    trainer = open_trainer()
    await trainer.start()
    begun = asyncio.Event()
    impatient = asyncio.create_task(
        trainer.run(0, STEPS, BATCH, "weights", weights, on_progress=lambda progress: begun.set())
    )
    await begun.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await trainer.run(STEPS, 1, BATCH, "gradient", weights)
    assert _adam_step(trainer) == STEPS


@pytest.mark.thorough
async def test_two_workers_do_what_one_does(
    open_trainer: Open, configure: Callable[..., RunConfig], weights: SharedVector, tmp_path: Path
) -> None:
    config, batch = configure(micro_batch=2), 5
    windows = Windows(open_corpus(config.data, 0, 1, None, tmp_path / "cache"), CONTEXT, config.run.seed, "node-a")
    alone = Replica(config, torch.device("cpu"), 1)
    alone.load_weights(torch.from_numpy(weights.array))
    gradient, trained = torch.empty(2, alone.layout.length)
    first_loss = alone.gradient(windows.batch(0, batch), batch).item()
    alone.store_gradient(gradient)
    for step in range(5):
        alone.train(step, windows.batch(step, batch), batch)
    alone.store_weights(trained)

    trainer = open_trainer(count=2, run=config)
    await trainer.start()
    told = list[Progress]()
    done = await trainer.run(0, 1, batch, "gradient", weights, on_progress=told.append)
    assert [it.loss for it in told] == pytest.approx([first_loss], rel=1e-6)
    assert done.tokens == told[0].tokens == batch * CONTEXT
    torch.testing.assert_close(torch.from_numpy(trainer.outbox.array), gradient, rtol=1e-4, atol=1e-6)
    await trainer.run(0, 5, batch, "weights", weights)
    torch.testing.assert_close(torch.from_numpy(trainer.outbox.array), trained, rtol=0, atol=1e-5)
    validated = alone.evaluate(torch.from_numpy(weights.array), windows.validation(2, BATCH))
    assert await trainer.evaluate(weights) == pytest.approx(validated, rel=1e-6)

    trainer.adam_m.array[:], trainer.adam_v.array[:] = 0.0, 0.0
    await trainer.run(0, STEPS, batch, "weights", weights, 0)
    expected, killer = _state(trainer), Killer()
    trainer.adam_m.array[:], trainer.adam_v.array[:] = 0.0, 0.0
    await trainer.run(0, STEPS, batch, "weights", weights, 0, on_progress=killer)
    assert len(killer.victims) == 2
    assert all(np.array_equal(a, b) for a, b in zip(_state(trainer), expected))


async def test_stopping_leaves_nothing_behind(open_trainer: Open, weights: SharedVector) -> None:
    trainer, before = open_trainer(), psutil.Process().children(recursive=True)
    await trainer.start()
    begun = asyncio.Event()
    job = asyncio.create_task(
        trainer.run(0, 1_000_000, BATCH, "weights", weights, on_progress=lambda progress: begun.set())
    )
    await begun.wait()
    processes = set(psutil.Process().children(recursive=True)) - set(before)
    assert processes
    home = Path(_processes()[0].environ()[ENGINE_VARIABLE]).parent
    assert home.is_dir()
    await trainer.stop()
    assert not any(process.is_running() for process in processes)
    assert not home.exists()
    with pytest.raises(asyncio.CancelledError):
        await job


@pytest.mark.thorough
async def test_bad_data_is_the_callers_error(open_trainer: Open, weights: SharedVector, tmp_path: Path) -> None:
    trainer = open_trainer(data_path=str(tmp_path / "nothing"))
    await trainer.start()
    with pytest.raises(PierError, match="nothing"):
        await trainer.run(0, 1, BATCH, "weights", weights)


@pytest.mark.thorough
async def test_workers_that_die_too_often_are_given_up(
    open_trainer: Open, weights: SharedVector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_process, "MAX_RESTARTS", 0)
    trainer = open_trainer()
    await trainer.start()
    with pytest.raises(PierError, match="ends again and again") as caught:
        await trainer.run(0, 1_000_000, BATCH, "weights", weights, on_progress=Killer())
    assert str(tmp_path / "node" / "logs" / "workers.log") in caught.value.problem
    assert "worker 0 was killed by SIGKILL" in caught.value.problem


@pytest.mark.thorough
async def test_rows_are_rated_as_the_model_here_rates_them(
    open_trainer: Open, weights: SharedVector, replica: Replica, windows: Windows, tmp_path: Path
) -> None:
    inputs, targets = windows.validation(2, 3)[0]
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1).astype(np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    trainer = open_trainer()
    await trainer.start()
    found = await trainer.rate(weights, tmp_path / "rows.npy")
    assert found.shape == (3,)
    assert found.tolist() == replica.rate(torch.from_numpy(weights.array), rows, at_once=BATCH).tolist()
    mean = replica.evaluate(torch.from_numpy(weights.array), [(inputs, targets)])
    assert found.mean() == pytest.approx(mean, rel=1e-6)

"""Workers that share the model train it as one that has all of it: through the trainer's own launcher, over gloo."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.hub_cases import made

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Progress
from pier_node.engine.parameters import local
from pier_node.engine.program import Program
from pier_node.trainer.command import Workers, own_trainer
from pier_node.trainer.data.corpus import SiteData, Windows, open_corpus
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import import_weights
from pier_node.trainer.parallel import Mode, Parallel
from pier_node.trainer.replica import Replica
from pier_node.trainer.sharding import spread
from pier_node.trainer.worker import WORKER

BATCH, STEPS = 5, 10
Configure = Callable[..., RunConfig]
Start = Callable[[RunConfig, int, Parallel], Program]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    started: list[Program] = []

    def build(config: RunConfig, workers: int, parallel: Parallel) -> Program:
        started.append(own_trainer(config, "node-a", SiteData(), tmp_path / "node", Workers(workers, parallel)))
        return started[-1]

    yield build
    for trainer in started:
        await trainer.stop()


def with_document_mask(config: RunConfig, tokenizer: Path) -> RunConfig:
    """A run with words for tokens, and another end of a document in most sequences."""
    library = Tokenizer(WordLevel({word: n for n, word in enumerate(["pier", "anchor", "outer", "</s>"])}, "pier"))
    library.pre_tokenizer = WhitespaceSplit()
    library.save(str(tokenizer))
    data = {"tokenizer": str(tokenizer), "document_mask": True}
    for number in range(200):
        (Path(config.data.path) / f"short {number}.txt").write_text("anchor outer pier " * (1 + number % 3))
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "parallel", "more"),
    [
        (2, Parallel("fsdp"), {}),
        (2, Parallel("fsdp"), {"compile": True}),
        (2, Parallel(tensor=2), {"compile": True}),
        (4, Parallel("fsdp", 2, "full"), {}),
        (4, Parallel("hsdp"), {}),
        (2, Parallel("ddp"), {"optimizer": "muon"}),
        (3, Parallel("fsdp"), {"optimizer": "muon"}),
        (4, Parallel("fsdp", 2), {"optimizer": "muon"}),
        (4, Parallel("hsdp"), {"optimizer": "muon"}),
    ],
    ids=[
        *("fsdp", "fsdp, compiled", "tensor", "fsdp and tensor", "hsdp"),
        *("ddp with muon", "fsdp with muon", "fsdp and tensor with muon", "hsdp with muon"),
    ],
)
async def test_workers_that_share_the_model_do_what_one_does(
    workers: int,
    parallel: Parallel,
    more: dict[str, Any],
    configure: Configure,
    start: Start,
    weights: SharedVector,
    windows: Windows,
    tmp_path: Path,
) -> None:
    config = configure(micro_batch=2, **more)
    if parallel.checkpointing == "full":
        config = with_document_mask(config, tmp_path / "tokenizer.json")
        windows = Windows(open_corpus(config.data, 0, 1, None, tmp_path / "cache"), 16, config.run.seed, "node-a")
    eager = config.model_copy(update={"inner": config.inner.model_copy(update={"compile": False})})
    alone = Replica(eager, torch.device("cpu"), 1)
    alone.load_weights(torch.from_numpy(weights.array))
    validated = alone.evaluate(torch.from_numpy(weights.array), windows.validation(2, 4))
    trainer = start(config, workers, parallel)
    await trainer.start()
    assert await trainer.evaluate(weights) == pytest.approx(validated, rel=1e-5)
    await trainer.run(0, 1, BATCH, "gradient", weights)
    alone.gradient(windows.batch(0, BATCH), BATCH)
    gradient = torch.empty(alone.layout.length)
    alone.store_gradient(gradient)
    np.testing.assert_allclose(trainer.outbox.array, gradient.numpy(), rtol=1e-3, atol=1e-6)

    for first in (0, STEPS):
        losses = [alone.train(step, windows.batch(step, BATCH), BATCH).item() for step in range(first, first + STEPS)]
        told = list[Progress]()
        done = await trainer.run(first, STEPS, BATCH, "weights", weights, on_progress=told.append)
        assert [losses[it.step - first] for it in told] == pytest.approx([it.loss for it in told], abs=1e-5)
        assert told[0].step == first
        weights.array[:] = trainer.outbox.array
    state = torch.empty(3, alone.layout.length)
    alone.store_weights(state[0])
    alone.store_moments(state[1], state[2])
    for ours, theirs in zip(state, (trainer.outbox, trainer.adam_m, trainer.adam_v)):
        np.testing.assert_allclose(theirs.array, ours.numpy(), rtol=0, atol=1e-5)

    # What they published is a checkpoint for one worker, and the other way round.
    alone.load_weights(torch.from_numpy(trainer.outbox.array))
    alone.load_moments(torch.from_numpy(trainer.adam_m.array), torch.from_numpy(trainer.adam_v.array), done.adam_step)
    alone.train(2 * STEPS, windows.batch(2 * STEPS, BATCH), BATCH)
    trainer.adam_m.array[:], trainer.adam_v.array[:] = state[1].numpy(), state[2].numpy()
    weights.array[:] = state[0].numpy()
    await trainer.run(2 * STEPS, 1, BATCH, "weights", weights, 2 * STEPS)
    alone.store_weights(state[0])
    np.testing.assert_allclose(trainer.outbox.array, state[0].numpy(), rtol=0, atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "mode"), [("gemma3_text", "fsdp"), ("qwen3", "ddp")])
async def test_workers_share_a_model_of_transformers(
    kind: str, mode: Mode, configure: Configure, start: Start, windows: Windows, tmp_path: Path
) -> None:
    """With tied and with untied embeddings, and with fewer sequences than workers could have."""
    made(kind, tmp_path / "model", vocab_size=256)
    model, flat = import_weights(tmp_path / "model")
    config = configure(micro_batch=2).model_copy(update={"model": model.model_copy(update={"context": 16})})
    alone, weights = Replica(config, torch.device("cpu"), 1), SharedVector(len(flat))
    alone.load_weights(flat)
    weights.array[:] = flat.numpy()
    validated = alone.evaluate(flat, windows.validation(2, 4))
    trainer = start(config, 2, Parallel(mode, checkpointing="full"))
    await trainer.start()
    assert await trainer.evaluate(weights) == pytest.approx(validated, rel=1e-5)
    told = list[Progress]()
    await trainer.run(0, STEPS, BATCH, "weights", weights, on_progress=told.append)
    losses = [alone.train(step, windows.batch(step, BATCH), BATCH).item() for step in range(STEPS)]
    assert [losses[it.step] for it in told] == pytest.approx([it.loss for it in told], abs=1e-4)
    state = torch.empty_like(flat)
    alone.store_weights(state)
    np.testing.assert_allclose(trainer.outbox.array, state.numpy(), rtol=0, atol=1e-4)


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """Joins as worker 0 of so many, of which the others are not there."""
    yield lambda workers: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("workers", "parallel", "part"),
    [
        (2, Parallel("fsdp"), 0.5),
        (2, Parallel("ddp", 2), 0.5),
        (4, Parallel("fsdp", 2), 0.25),
        (4, Parallel("hsdp"), 0.5),
    ],
)
def test_each_worker_holds_its_part(
    workers: int, parallel: Parallel, part: float, config: RunConfig, group: Callable[[int], None]
) -> None:
    group(workers)
    with torch.device("meta"):
        model = Decoder(config.model)
    whole = sum(parameter.numel() for parameter in model.parameters())
    shares = spread(model, parallel, workers, torch.device("cpu"), bf16=False)
    own = sum(local(parameter).numel() for parameter in model.parameters())
    assert own / whole == pytest.approx(part, rel=0.02)
    assert shares.size() == workers // parallel.tensor


@pytest.mark.parametrize(
    ("workers", "parallel", "words"),
    [
        (3, Parallel(tensor=2), "cannot form groups"),
        (4, Parallel(tensor=4), "heads = 2"),
        (4, Parallel("ddp", 2), "--parallel ddp"),
        (3, Parallel("hsdp"), "hsdp needs 2 equal parts"),
    ],
)
def test_what_workers_cannot_do_is_refused(workers: int, parallel: Parallel, words: str, config: RunConfig) -> None:
    with pytest.raises(PierError, match=words):
        parallel.check(config, workers)


@pytest.mark.processes
async def test_all_workers_are_restarted_when_one_with_a_part_dies(
    config: RunConfig, start: Start, weights: SharedVector
) -> None:
    trainer, victims = start(config, 2, Parallel("fsdp")), list[psutil.Process]()
    await trainer.start()
    await trainer.run(0, 2 * STEPS, BATCH, "weights", weights)
    undisturbed = trainer.outbox.array.copy()

    def kill(_: Progress) -> None:
        if not victims:
            children = psutil.Process().children(recursive=True)
            victims.append([child for child in children if child.name() == WORKER][-1])
            victims[0].kill()

    trainer.adam_m.array[:], trainer.adam_v.array[:] = 0.0, 0.0
    done = await trainer.run(0, 2 * STEPS, BATCH, "weights", weights, 0, on_progress=kill)
    assert (len(victims), done.adam_step) == (1, 2 * STEPS)
    np.testing.assert_allclose(trainer.outbox.array, undisturbed, rtol=0, atol=1e-6)

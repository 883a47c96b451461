"""`pier-node evaluate`: how well a model predicts the validation split of a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pier_node.commands.weights import Weights, find_weights, pick_device, site_config
from pier_node.config import RunConfig
from pier_node.data.corpus import open_corpus
from pier_node.data.site_data import SiteData
from pier_node.data.tokens import Tokenizer, check_vocab, open_tokenizer
from pier_node.data.windows import Batch, Windows
from pier_node.inner.devices import uses_bf16
from pier_node.model.evaluate import bits_per_byte, validation_loss
from pier_node.settings import Settings
from pier_node.site import SiteRecord


@dataclass(frozen=True)
class Score:
    """What was measured.

    Attributes:
        loss: nats a token.
        perplexity: e^loss: a token's choice was as hard as one among so many.
        bits_per_byte: of text: comparable between tokenizers.
        tokens: that were predicted.
    """

    model: str
    round: int | None
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


def evaluate(data: Path, model: Path | None, batches: int, dataset: str | None, device: str, as_json: bool) -> str:
    """Measure; returns what to print. Raises PierError.

    Args:
        data: the site whose run has the validation split, and the checkpoint unless there is a `model` folder.
        batches: 0: as many as the run's own validation takes.
        dataset: replaces the path of [data]; None: what the site was started with.
        device: see `pick_device`.
    """
    config, weights = site_config(data), find_weights(data, model)
    score = measure(config, weights, validation_windows(config, weights, data, dataset, batches), device)
    return json.dumps(asdict(score)) if as_json else _table(score)


def measure(config: RunConfig, weights: Weights, windows: list[Batch], device: str) -> Score:
    """Predict all windows, as a worker's own validation does."""
    place = pick_device(device)
    loss = validation_loss(weights.model(place), windows, uses_bf16(place, config.inner.precision))
    width = bytes_per_token(open_tokenizer(config.data.tokenizer), windows)
    tokens = sum(targets.size for _, targets in windows)
    return Score(weights.origin, weights.round, loss, math.exp(loss), bits_per_byte(loss, width), tokens)


def bytes_per_token(tokenizer: Tokenizer, windows: list[Batch]) -> float:
    """Bytes of UTF-8 text behind the targets, over their number."""
    if tokenizer.fingerprint == "bytes":
        return 1.0
    rows = [row for _, targets in windows for row in targets]
    return sum(len(tokenizer.decode(row).encode()) for row in rows) / sum(np.size(row) for row in rows)


def validation_windows(
    config: RunConfig, weights: Weights, data: Path, dataset: str | None, batches: int
) -> list[Batch]:
    """What a site validates on; see `evaluate` for the arguments. Raises PierError."""
    record = SiteRecord.load(data)
    told = Settings(data, data=dataset).after(record)
    text = SiteData.of(config, record.slot if record else 0, told.data, told.shared_data)
    corpus = open_corpus(config.data, text.slot, text.slots, text.path, data / "cache")
    check_vocab(corpus.vocab_size, weights.config.vocab_size)
    windows = Windows(corpus, weights.config.context, config.run.seed, "evaluate")
    inner = config.inner
    at_once = min(inner.batch_size, inner.micro_batch or inner.batch_size)
    return windows.validation(batches or inner.eval_batches, inner.batch_size, at_once)


def _table(score: Score) -> str:
    return (
        f"{score.model[0].upper()}{score.model[1:]}, on {score.tokens:,} tokens of the validation split:\n"
        f"  loss           {score.loss:.4f} nats a token\n"
        f"  perplexity     {score.perplexity:.2f}\n"
        f"  bits per byte  {score.bits_per_byte:.4f}"
    )

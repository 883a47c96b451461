"""`pier-node export`, `generate` and `evaluate`: what is done with a trained model.

export writes the newest checkpoint of a site as a folder that Hugging Face's libraries load. generate lets a model
continue a prompt. evaluate says how well it predicts the validation split of a run; with `--skip`, also with stages
left out.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pier_node.base.errors import PierError
from pier_node.base.units import perplexity, printable
from pier_node.config.run import RunConfig
from pier_node.pipeline.stage import stage_blocks
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.saved_model import Weights, find_weights, newest_weights, pick_device, site_config
from pier_node.site.settings import Settings
from pier_node.trainer.data.corpus import Batch, SiteData, Windows, open_corpus
from pier_node.trainer.data.tokens import Tokenizer, document_separator, open_tokenizer, pieces
from pier_node.trainer.devices import uses_bf16
from pier_node.trainer.model import export as writer
from pier_node.trainer.model import hub
from pier_node.trainer.model.decoder import stream
from pier_node.trainer.model.evaluate import Omission, bits_per_byte, choices, early_exits, omissions, validation_loss
from pier_node.trainer.model.gguf import require_gguf, write_gguf
from pier_node.trainer.model.hub_part import divisible


def export(data: Path, out: Path, force: bool = False, gguf: bool = False) -> str:
    """Write the folder, with `gguf` also a GGUF file in it. Returns the message for the user.

    Raises:
        PierError: `out` contains something that no export wrote (without `force`), or cannot be written; or there can
            be no GGUF file.
    """
    if gguf:
        require_gguf()
    if not force:
        writer.require_ours(out)
    weights = newest_weights(data)
    if gguf and weights.config.transformers:
        raise PierError(
            f"--gguf is for Pier's own decoder (Llama, GPT-2), not for a {weights.config.name}",
            "Export without it, and have llama.cpp's convert_hf_to_gguf.py make a GGUF file of the folder.",
        )
    hub.export(weights.config, weights.flat, out, weights.tokenizer)
    more = f"  llama-cli -m {shlex.quote(str(write_gguf(out)))} -p PROMPT\n" if gguf else ""
    return (
        f"Wrote {weights.origin}, {len(weights.flat):,} parameters in fp32, with its tokenizer, to {out}\n\n"
        f"  pier-node generate --model {shlex.quote(str(out))} PROMPT\n"
        f"  transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})\n{more}"
    )


@dataclass(frozen=True)
class GenerateOptions:
    """Which model continues which prompt; see `EvaluateOptions`, and trainer/model/decoder.py for the sampling."""

    folder: Path
    model: Path | None
    prompt: str
    tokens: int
    temperature: float
    top_k: int
    seed: int
    device: str


def generate(options: GenerateOptions, show: Callable[[str], None]) -> None:
    """Show the prompt and its continuation. Raises PierError."""
    prompt = options.prompt
    if prompt.encode(errors="replace").decode() != prompt:
        raise PierError("the prompt is not UTF-8", "Set your terminal to UTF-8.")
    weights = find_weights(options.folder, options.model)
    tokenizer = weights.open_tokenizer()
    ids = [int(id) for id in tokenizer.encode(prompt)]
    model = weights.any_model(pick_device(options.device))
    made = stream(model, ids, options.tokens, options.temperature, options.top_k, options.seed)
    for piece in itertools.chain([prompt], pieces(tokenizer, ids, made)):
        show(printable(piece))


@dataclass(frozen=True)
class Score:
    """The measured scores.

    Attributes:
        loss: nats per token.
        perplexity: e^loss: each token was as hard to predict as a choice among that many equally likely ones.
        bits_per_byte: of text: comparable between tokenizers.
        tokens: number of tokens predicted.
    """

    model: str
    round: int | None
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True)
class EvaluateOptions:
    """Which model to measure, and on what.

    Attributes:
        folder: the site whose run has the validation split, and whose checkpoint is used unless `model` names a folder.
        batches: 0: as many as in the run's own validation.
        dataset: replaces the path of [data]; None: as the site was started.
        device: see `pick_device`.
    """

    folder: Path
    model: Path | None
    batches: int
    dataset: str | None
    device: str
    as_json: bool

    def opened(self) -> tuple[RunConfig, Weights, list[Batch]]:
        """The run, the model and the windows on which it is measured. Raises PierError."""
        config, weights = site_config(self.folder), find_weights(self.folder, self.model)
        return config, weights, validation_windows(config, weights, self.folder, self.dataset, self.batches)


def evaluate(options: EvaluateOptions) -> str:
    """Measure a model. Returns the text to print. Raises PierError."""
    score = measure(*options.opened(), options.device)
    return json.dumps(asdict(score)) if options.as_json else _table(score)


def measure(config: RunConfig, weights: Weights, windows: list[Batch], device: str) -> Score:
    """Predict all windows, as in a worker's own validation."""
    place = pick_device(device)
    decoder = weights.any_model(place)
    decoder.separator = document_separator(config.data)
    loss = validation_loss(decoder, windows, uses_bf16(place, config.inner.precision))
    width = bytes_per_token(open_tokenizer(config.data.tokenizer), windows)
    tokens = sum(targets.size for _, targets in windows)
    return Score(weights.origin, weights.round, loss, perplexity(loss), bits_per_byte(loss, width), tokens)


def bytes_per_token(tokenizer: Tokenizer, windows: list[Batch]) -> float:
    """Bytes of UTF-8 text per target token."""
    if tokenizer.fingerprint == "bytes":
        return 1.0
    rows = [row for _, targets in windows for row in targets]
    return sum(len(tokenizer.decode(row).encode()) for row in rows) / sum(np.size(row) for row in rows)


def validation_windows(
    config: RunConfig, weights: Weights, data: Path, dataset: str | None, batches: int
) -> list[Batch]:
    """The windows on which a site validates; see `EvaluateOptions` for the arguments. Raises PierError."""
    record = SiteRecord.load(data)
    told = Settings(data, data=dataset).after(record)
    text = SiteData.of(config, record.slot if record else 0, told.data, told.shared_data)
    corpus = open_corpus(config.data, text.slot, text.slots, text.path, data / "cache")
    _check_tokenizer(config, weights)
    context = min(config.model.context, weights.config.context)  # that of a model of transformers may be far longer
    windows = Windows(corpus, context, config.run.seed, "evaluate", weights.config.vocab_size)
    inner = config.inner
    at_once = min(inner.batch_size, inner.micro_batch or inner.batch_size)
    return windows.validation(batches or inner.eval_batches, inner.batch_size, at_once)


PROBE = "Sphinx of black quartz, judge my vow: 1234.5 (ex\u00e6quo \u2014 \u5b57).\n\tif x <= 0:"
"""Text by which tokenizers are compared: two files with the same tokens need not have the same bytes."""


def _check_tokenizer(config: RunConfig, weights: Weights) -> None:
    """Raise PierError if the run's text is not in the tokens of the model; a folder without a tokenizer is trusted."""
    if weights.tokenizer != "bytes" and not Path(weights.tokenizer).exists():
        return
    own, its = open_tokenizer(config.data.tokenizer), weights.open_tokenizer()
    if not np.array_equal(own.encode(PROBE), its.encode(PROBE)):
        raise PierError(
            f"{weights.origin} has another tokenizer than the run, so its loss on the run's tokens would mean nothing",
            "Name the --data folder of a run with the model's tokenizer.",
        )


def _table(score: Score) -> str:
    return (
        f"{score.model[0].upper()}{score.model[1:]}, on {score.tokens:,} tokens of the validation split:\n"
        f"  loss           {score.loss:.4f} nats a token\n"
        f"  perplexity     {score.perplexity:.2f}\n"
        f"  bits per byte  {score.bits_per_byte:.4f}"
    )


Rows = dict[str, list[Omission]]


def evaluate_omissions(options: EvaluateOptions, skip: float, plot: Path | None) -> str:
    """Measure a model without some stages. Returns the text to print. Raises PierError.

    Args:
        skip: fraction of the stages to leave out.
        plot: path of a picture to write.
    """
    (config, weights, windows), place = options.opened(), pick_device(options.device)
    layers, stages = weights.config.layers, config.pipeline.stages
    blocks = stage_blocks(layers, stages if stages > 1 else layers)  # without a pipeline, every block is a stage
    count = min(round(skip * len(blocks)), len(blocks) - 1)
    decoder, bf16 = divisible(weights.any_model(place)), uses_bf16(place, config.inner.precision)
    decoder.separator = document_separator(config.data)
    wanted: dict[str, list[tuple[int, ...]]] = {
        "nothing": [()],
        "any": choices(len(blocks), count),
        "the last": early_exits(len(blocks)),
    }
    rows = {kind: omissions(decoder, windows, blocks, left, bf16) for kind, left in wanted.items()}
    if plot:
        _draw(rows, plot)
    if options.as_json:
        return json.dumps({kind: [asdict(it) for it in found] for kind, found in rows.items()})
    return _omission_table(rows, len(blocks), weights.origin)


def _omission_table(rows: Rows, stages: int, origin: str) -> str:
    (whole,) = rows["nothing"]
    lines = [f"{origin[0].upper()}{origin[1:]}, {stages} stages; left out:", f"{'':20}  loss  perplexity  against all"]
    for it in [whole, *rows["any"], *rows["the last"]]:
        name = ", ".join(map(str, it.stages)) or "nothing"
        grown = 100 * (perplexity(it.loss - whole.loss) - 1)
        lines.append(f"{name:18}  {it.loss:.4f}  {perplexity(it.loss):10.2f}  {grown:+9.1f} %")
    if found := rows["any"]:
        mean = sum(perplexity(it.loss) for it in found) / len(found)
        lines.append(f"{len(found[0].stages)} of {stages} left out, in the mean: perplexity {mean:.2f}")
    return "\n".join(lines)


def _draw(rows: Rows, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, mark in (("any", "o"), ("the last", "s")):
        points = [(len(it.stages), perplexity(it.loss)) for it in [*rows["nothing"], *rows[kind]]]
        axes.plot(*zip(*points), mark, label=f"{kind} stages left out", alpha=0.7)
    axes.set_xlabel("stages left out")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)

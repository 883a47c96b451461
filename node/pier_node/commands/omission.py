"""`pier-node evaluate --skip`: the perplexity of a model with stages left out, as a table and a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from pier_node.commands.evaluate import validation_windows
from pier_node.commands.weights import find_weights, pick_device, site_config
from pier_node.config import RunConfig
from pier_node.inner.devices import uses_bf16
from pier_node.model.omission import Omission, choices, early_exits, omissions
from pier_node.pipeline.cut import stage_blocks

Rows = dict[str, list[Omission]]


def evaluate_omissions(
    data: Path,
    model: Path | None,
    batches: int,
    dataset: str | None,
    device: str,
    as_json: bool,
    skip: float,
    plot: Path | None,
) -> str:
    """Measure; returns what to print. See `evaluate` for the other arguments. Raises PierError.

    Args:
        skip: the part of the stages to leave out.
        plot: a PNG to write.
    """
    config, weights, place = site_config(data), find_weights(data, model), pick_device(device)
    windows = validation_windows(config, weights, data, dataset, batches)
    blocks = stage_blocks(weights.config.layers, _stages(config, weights.config.layers))
    count = min(round(skip * len(blocks)), len(blocks) - 1)
    decoder, bf16 = weights.model(place), uses_bf16(place, config.inner.precision)
    wanted: dict[str, list[tuple[int, ...]]] = {
        "nothing": [()],
        "any": choices(len(blocks), count),
        "the last": early_exits(len(blocks)),
    }
    rows = {kind: omissions(decoder, windows, blocks, stages, bf16) for kind, stages in wanted.items()}
    if plot:
        _draw(rows, plot)
    if as_json:
        return json.dumps({kind: [asdict(it) for it in found] for kind, found in rows.items()})
    return _table(rows, len(blocks), weights.origin)


def _stages(config: RunConfig, layers: int) -> int:
    """Of the run's pipeline; of a run without one every block is a stage."""
    return config.pipeline.stages if config.pipeline.stages > 1 else layers


def _table(rows: Rows, stages: int, origin: str) -> str:
    (whole,) = rows["nothing"]
    lines = [f"{origin[0].upper()}{origin[1:]}, {stages} stages; left out:", f"{'':20}  loss  perplexity  against all"]
    for it in [whole, *rows["any"], *rows["the last"]]:
        name = ", ".join(map(str, it.stages)) or "nothing"
        grown = 100 * (math.exp(it.loss - whole.loss) - 1)
        lines.append(f"{name:18}  {it.loss:.4f}  {math.exp(it.loss):10.2f}  {grown:+9.1f} %")
    if found := rows["any"]:
        mean = sum(math.exp(it.loss) for it in found) / len(found)
        lines.append(f"{len(found[0].stages)} of {stages} left out, in the mean: perplexity {mean:.2f}")
    return "\n".join(lines)


def _draw(rows: Rows, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, mark in (("any", "o"), ("the last", "s")):
        points = [(len(it.stages), math.exp(it.loss)) for it in [*rows["nothing"], *rows[kind]]]
        axes.plot(*zip(*points), mark, label=f"{kind} stages left out", alpha=0.7)
    axes.set_xlabel("stages left out")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)

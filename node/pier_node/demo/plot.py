"""The losses of a demo as a picture."""

from __future__ import annotations

from pathlib import Path

from pier_node.demo.record import Curve, Record

SMOOTHING = 0.85
"""Weight of the past in the training losses that are drawn."""


def draw(record: Record, file: Path) -> None:
    """Write a PNG: training loss of each site and validation loss over inner steps, and the end of a solo start."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for track in record.tracks.values():
        if track.loss:
            axes.plot(*zip(*smoothed(track.loss)), linewidth=1, alpha=0.6, label=f"training, {track.name}")
    axes.plot(*zip(*record.validation), color="black", marker="o", markersize=3.5, label="validation, the same for all")
    if record.start_steps:
        axes.axvspan(0, record.start_steps, color="grey", alpha=0.15, label="start: one site with everybody's batch")
    config = record.config
    axes.set_title(f"{record.parameters:,} parameters, {config.run.sites} sites, {record.rounds} outer rounds")
    axes.set_xlabel("inner step")
    axes.set_ylabel("loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def smoothed(curve: Curve) -> Curve:
    """Exponential moving average over the points, without the bias of its beginning (Kingma and Ba, 2015)."""
    smooth, total, weight = [], 0.0, 0.0
    for step, value in curve:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + 1 - SMOOTHING
        smooth.append((step, total / weight))
    return smooth

"""Scores of an ensemble as a picture: how far each method is behind the best of every domain."""

from __future__ import annotations

from pathlib import Path

from pier_node.errors import PierError
from pier_node.experts.comparison import UNRANKED
from pier_node.experts.report import Report

WIDTH = 0.8
"""Of the space between two domains that its points take."""


def draw(report: Report, file: Path) -> None:
    """Write it as the ending of the file says (.svg, .png, .pdf). Raises PierError."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [name for name in report.mean if name not in UNRANKED]
    columns = {**{domain: result.standings for domain, result in report.domains.items()}, "mean": report.mean}
    figure, axes = pyplot.subplots(figsize=(max(6, 1.5 * len(columns)), 4.5))
    for number, name in enumerate(names):
        standings = [column[name] for column in columns.values()]
        places = [at + WIDTH * ((number + 0.5) / len(names) - 0.5) for at in range(len(columns))]
        middle = [standing.behind for standing in standings]
        below = [max(0.0, standing.behind - standing.low) for standing in standings]
        above = [max(0.0, standing.high - standing.behind) for standing in standings]
        axes.errorbar(places, middle, yerr=[below, above], fmt="o", markersize=4, capsize=2, label=name)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(columns)), [*columns], rotation=30, ha="right")
    axes.set_ylabel("bits per byte behind the best")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise PierError(f"{file}: cannot draw: {error}", "Name a file that ends in .svg, .png or .pdf.") from error
    finally:
        pyplot.close(figure)

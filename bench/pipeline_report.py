"""What the cells of bench/pipeline_convergence.py say: tables, which docs/results.md takes as they are, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

Cell = dict[str, Any]
Arms = dict[str, list[Cell]]
"""Arm -> its cells, by seed."""
Floats = npt.NDArray[np.float64]
LEFT_OUT = ("quarter", "third", "half")
EXITS = "early exit"
TRAINED = {"skip 25 %": "quarter", "skip 33 %": "third", "skip 50 %": "half"}
"""Arm -> as much left out of the model as its microbatches skipped in training."""


def arms_of(cells: Sequence[Cell]) -> Arms:
    """The cells of each arm, `full` first, then by how much is skipped."""
    names = sorted({cell["arm"] for cell in cells}, key=lambda it: (it != "full", "," in it, it))
    return {name: sorted((it for it in cells if it["arm"] == name), key=lambda it: it["seed"]) for name in names}


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Of the losses, and of what leaving out stages costs."""
    arms = arms_of(cells)
    return [_losses(arms), _omission(arms), _exits(arms)] if arms else []


def differences(arms: Arms, arm: str) -> Floats:
    """Final losses less those of `full`, by the seeds that both have, [seeds]; nats a byte."""
    full = {it["seed"]: _final(it) for it in arms.get("full", [])}
    return np.array([_final(it) - full[it["seed"]] for it in arms[arm] if it["seed"] in full])


def worse(cell: Cell, what: str) -> Floats:
    """By how much perplexity rises for each choice of what is left out, [choices]; 0.1 is a tenth."""
    return np.asarray(np.expm1(np.array([loss for _, loss in cell["omission"][what]]) - _final(cell)))


def _final(cell: Cell) -> float:
    return float(cell["curve"][-1][1])


def _as_trained(cell: Cell) -> float:
    """The mean loss over the choices of what is left out, where as much is as in training; nats a byte."""
    what = TRAINED.get(cell["arm"].partition(",")[0])
    return float(np.mean([loss for _, loss in cell["omission"][what]])) if what else _final(cell)


def _swapped(cells: Sequence[Cell]) -> float:
    """The part of the microbatches whose stages were not in ascending order."""
    visits = [([*map(int, route.split())], count) for it in cells for route, count in it["visits"].items()]
    return float(sum(count for route, count in visits if route != sorted(route)) / sum(count for _, count in visits))


def _losses(arms: Arms) -> Table:
    headings = "seeds", "mean", "std", "min – max", "to full, by seed", "as trained", "swapped"
    shown = _table("Final validation loss of the whole model, nats a byte", *headings)
    for arm, cells in arms.items():
        losses = np.array([_final(it) for it in cells])
        apart = differences(arms, arm)
        to_full = f"{apart.mean():+.4f} ({apart.min():+.4f} – {apart.max():+.4f})" if len(apart) else ""
        std = f"{losses.std(ddof=1):.4f}" if len(losses) > 1 else ""
        spread = f"{losses.mean():.4f}", std, f"{losses.min():.4f} – {losses.max():.4f}"
        trained = np.mean([_as_trained(it) for it in cells])
        shown.add_row(arm, str(len(cells)), *spread, to_full, f"{trained:.4f}", f"{_swapped(cells):.0%}")
    return shown


def _omission(arms: Arms) -> Table:
    title = "Perplexity with stages left out, to that with all of them: mean over choices and seeds (best – worst)"
    shown = _table(title, *(f"any {part}" for part in LEFT_OUT))
    for arm, cells in arms.items():
        found = [np.concatenate([worse(it, what) for it in cells]) for what in LEFT_OUT]
        shown.add_row(arm, *(f"{it.mean():+.1%} ({it.min():+.1%} – {it.max():+.1%})" for it in found))
    return shown


def _exits(arms: Arms) -> Table:
    count = len(next(iter(arms.values()))[0]["omission"][EXITS])
    headings = (f"last {left_out}" for left_out in range(1, count + 1))
    shown = _table("Early exit: the same without the last stages of six", *headings)
    for arm, cells in arms.items():
        means = np.mean([worse(it, EXITS) for it in cells], axis=0)
        shown.add_row(arm, *(f"{value:+.1%}" for value in means))
    return shown


def _table(title: str, *headings: str) -> Table:
    shown = Table("arm", title=title, title_justify="left", box=box.MARKDOWN)
    for heading in headings:
        shown.add_column(heading, justify="right")
    return shown


def plot(cells: Sequence[Cell], file: Path) -> None:
    """Validation loss over steps, perplexity over stages left out: a line for the mean, a band for the seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, omission, exits) = pyplot.subplots(1, 3, figsize=(16, 5))
    for number, (arm, found) in enumerate(arms_of(cells).items()):
        style = {
            "color": f"C{number % 4}" if number < 4 else f"C{number - 3}",
            "linestyle": "--" if "," in arm else "-",
        }
        steps = [step for step, _ in found[0]["curve"]]
        _band(losses, steps, [[loss for _, loss in it["curve"]] for it in found], arm, style)
        parts = [[100 * worse(it, what).mean() for what in LEFT_OUT] for it in found]
        _band(omission, [100 / 4, 100 / 3, 100 / 2], parts, arm, style)
        curves = [100 * worse(it, EXITS) for it in found]
        _band(exits, range(1, len(curves[0]) + 1), curves, arm, style)
    for axes, x, y in (
        (losses, "step", "validation loss of the whole model, nats a byte"),
        (omission, "part of the stages left out, %, mean of all choices", "perplexity to that of the whole model, %"),
        (exits, "last stages of six left out", ""),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    exits.set_yscale("symlog", linthresh=10)
    losses.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _band(axes: Any, x: Sequence[float], rows: Sequence[Sequence[float] | Floats], label: str, style: Any) -> None:
    values = np.array(rows)  # [seeds, points]
    axes.plot(x, values.mean(axis=0), label=label, **style)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), alpha=0.12, color=style["color"])

"""Reports the cells of bench/pipeline_convergence.py: tables, which docs/results.md contains unchanged, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from bench.pipeline_arms import ALL, ARMS, CODED, MIXED, REPLICAS, STEPS, SUBSPACES
from pier_node.pipeline.activation_codec import TensorFormat
from pier_node.pipeline.stage import stage_blocks

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


def tables(cells: Sequence[Cell], planned: Mapping[str, float]) -> list[Table]:
    """Of the losses, of what leaving out stages costs, of replicas, of codecs, and of equal work and time.

    Args:
        planned: part of a full pipeline's time that an iteration takes, by the arm that skips: see `times`.
    """
    arms = arms_of(cells)
    skipping = {name: found for name, found in arms.items() if name in ARMS}
    if "full" not in skipping:
        return []
    kinds = [_losses(skipping), _omission(skipping), _exits(skipping)]
    kinds += [_beside("Replicas that step apart", arms, [*REPLICAS]), _coded(arms)]
    return [*kinds, _beside("Blocks that write to a subspace", arms, [*SUBSPACES]), _judged(arms, planned)]


def times(paths: Path) -> dict[str, float]:
    """From the instances of bench/paths.py: an iteration that skips, to a full pipeline placed by the same search."""
    found: dict[str, list[float]] = {}
    for it in json.loads(paths.read_text())["results"]:
        part = it["name"].split("_")[1]
        found.setdefault(f"skip {part} %", []).append(it["in_order"]["makespan_s"] / it["full"]["makespan_s"])
    return {arm: median(ratios) for arm, ratios in found.items()}


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


def _beside(title: str, arms: Arms, kinds: Sequence[str]) -> Table:
    """Arms beside the first of them, seed by seed."""
    shown = _table(f"{title}: final validation loss, nats a byte", "seeds", "mean", f"to {kinds[0]}")
    first = {it["seed"]: _final(it) for it in arms.get(kinds[0], [])}
    for arm in (name for name in kinds if name in arms):
        apart = np.array([_final(it) / first[it["seed"]] - 1 for it in arms[arm] if it["seed"] in first])
        spread = f"{apart.mean():+.1%} ({apart.min():+.1%} – {apart.max():+.1%})" if len(apart) else ""
        shown.add_row(arm, str(len(arms[arm])), f"{np.mean([_final(it) for it in arms[arm]]):.4f}", spread)
    return shown


def _coded(arms: Arms) -> Table:
    headings = "bits a value", "seeds", "mean", "to full, by seed", "in per cent", "mean within 1 %"
    shown = _table("Codecs between stages, full pipeline: final validation loss, nats a byte", *headings)
    for arm in (name for name in CODED if name in arms):
        cells, apart = arms[arm], differences(arms, arm)
        whole = np.mean([_final(it) for it in arms["full"] if it["seed"] in {cell["seed"] for cell in cells}])
        dim = cells[0]["setting"]["dim"]
        kinds = (ALL[arm][key] for key in ("activation_codec", "gradient_codec"))
        bits = " / ".join(f"{8 * TensorFormat(kind, (1, 1, dim)).size / dim:.2f}" for kind in kinds)
        spread = f"{apart.mean():+.4f} ({apart.min():+.4f} – {apart.max():+.4f})"
        parts = f"{apart.mean() / whole:+.1%} ({apart.min() / whole:+.1%} – {apart.max() / whole:+.1%})"
        loss = f"{np.mean([_final(it) for it in cells]):.4f}"
        shown.add_row(arm, bits, str(len(cells)), loss, spread, parts, "yes" if apart.mean() < 0.01 * whole else "no")
    return shown


def work(cell: Cell) -> float:
    """Blocks that the microbatches of a run have visited, to those of a full one of as many steps."""
    stages = stage_blocks(cell["setting"]["layers"], ALL[cell["arm"]]["stages"])
    visits = {route: sum(len(stages[int(stage)]) for stage in route.split()) for route in cell["visits"]}
    done = sum(visits[route] * count for route, count in cell["visits"].items())
    return float(done / (cell["setting"]["layers"] * sum(cell["visits"].values())))


def full_part(cell: Cell) -> float:
    """The part of the microbatches of a run that visited all stages."""
    stages = ALL[cell["arm"]]["stages"]
    full = sum(count for route, count in cell["visits"].items() if len(route.split()) == stages)
    return float(full / sum(cell["visits"].values()))


def shorter(arms: Arms, seed: int, part: float) -> float:
    """Final loss of a full run with this part of the steps, between the runs that are there; NaN beyond them."""
    steps = {it: f"full, {it} steps" for it in STEPS}
    found = {it: _final(cell) for it, name in steps.items() for cell in arms.get(name, []) if cell["seed"] == seed}
    whole = _of_seed(arms["full"], seed)
    total = whole["setting"]["total_steps"]
    found[total] = _final(whole)
    return _between(found, part * total)


def so_far(arms: Arms, seed: int, part: float) -> float:
    """Loss of the full run after this part of its steps, at a learning rate with which no run ends."""
    whole = _of_seed(arms["full"], seed)
    return _between(dict(whole["curve"]), part * whole["setting"]["total_steps"])


def reached(arms: Arms, seed: int, loss: float) -> float:
    """The part of its steps after which the full run has this loss; NaN if it never has."""
    whole = _of_seed(arms["full"], seed)
    steps, losses = zip(*whole["curve"], strict=True)
    lowest = np.minimum.accumulate(losses)
    step = np.exp(np.interp(-loss, -lowest, np.log(steps), left=np.nan, right=np.nan))
    return float(step / whole["setting"]["total_steps"])


def _of_seed(cells: Sequence[Cell], seed: int) -> Cell:
    return next(cell for cell in cells if cell["seed"] == seed)


def _between(losses: Mapping[int, float], step: float) -> float:
    """A loss between those of some steps, on a line over log steps; NaN beyond them."""
    known = sorted(losses)
    values = [losses[it] for it in known]
    return float(np.interp(np.log(step), np.log(known), values, left=np.nan, right=np.nan))


def _judged(arms: Arms, planned: Mapping[str, float]) -> Table:
    """A negative gap: skipping wins."""
    judged = "to full so far, equal {0}", "shorter", "{0} to its loss, of full's"
    headings = ["loss", *(it.format(what) for what in ("work", "time") for it in ("{0}", *judged))]
    shown = _table("Skipping at equal work and at equal time: final validation loss, nats a byte", *headings)
    for arm in (name for name in ARMS | MIXED if name != "full" and name in arms):
        base = planned.get(arm.partition(",")[0])
        if base is None:
            continue
        full = float(np.mean([full_part(it) for it in arms[arm]]))
        cells, cut = arms[arm], [f"{np.mean([_final(it) for it in arms[arm]]):.3f}"]
        for part in (float(np.mean([work(it) for it in cells])), base * (1 - full) + full):
            cut.append(f"{part:.0%}")
            for reference in (so_far, shorter):
                gaps = np.array([_final(it) - reference(arms, it["seed"], part) for it in cells])
                gaps = gaps[np.isfinite(gaps)]
                cut.append(f"{gaps.mean():+.3f} ({gaps.min():+.3f} – {gaps.max():+.3f})" if len(gaps) else "")
            cut.append(f"{np.mean([part / reached(arms, it['seed'], _final(it)) for it in cells]):.2f}")
        shown.add_row(arm, *cut)
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
    shown = {arm: found for arm, found in arms_of(cells).items() if arm in ARMS}
    for number, (arm, found) in enumerate(shown.items()):
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

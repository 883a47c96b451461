"""What bench/hdee.py found, as tables in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import RenderableType
from rich.table import Table

from bench.hdee_setting import BASE

GROUPS = {"excluded": " Excluded from training.", "private": " Private.", "shared": " Shared."}
SIGNS = {"win": " ✓", "tie": "", "loss": " ✗"}


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """Scores by domain, what they come to, and the permutations."""
    arms = found["arms"]
    shown: list[RenderableType] = [_domains("", arms, found["setting"]["domains"])]
    for name, kind in GROUPS.items():
        if name in next(iter(arms.values())):
            group = {arm: each[name] for arm, each in arms.items()}
            shown.append(_domains(kind, group, [*group[BASE]["bits"]]))
    return [*shown, _totals(found), *_lines(found)]


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Gaps to the base by domain, with intervals; small marks are single seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    arms = [arm for arm in found["arms"] if arm != BASE]
    domains = [*found["setting"]["domains"]]
    groups = [group for group in (arms[:3], arms[3:]) if group]
    figure, (axes,) = pyplot.subplots(1, len(groups), figsize=(6 * len(groups), 5), sharey=True, squeeze=False)
    for axis, group in zip(axes, groups):
        for number, arm in enumerate(group):
            gaps = [found["arms"][arm]["mean_gap"], *(found["arms"][arm]["gaps"][domain] for domain in domains)]
            places = [row + 0.25 * (number - (len(group) - 1) / 2) for row in range(len(gaps))]
            spread = [[gap["mean"] - gap["low"] for gap in gaps], [gap["high"] - gap["mean"] for gap in gaps]]
            means = [gap["mean"] for gap in gaps]
            (line, *_) = axis.errorbar(means, places, xerr=spread, fmt="o", markersize=4, capsize=2, label=arm)
            for place, gap in zip(places, gaps):
                axis.plot(gap["seeds"], [place] * len(gap["seeds"]), "|", color=line.get_color(), alpha=0.6)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_xlabel(f"bits per byte more than {BASE} (left is better)")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(group), frameon=False)
    axes[0].set_yticks(range(len(domains) + 1), ["mean", *domains])
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _domains(kind: str, arms: Mapping[str, Any], domains: Sequence[str]) -> Table:
    title = f"Bits per byte, mean of the seeds; ✓ wins against {BASE}, ✗ loses.{kind}"
    table = Table("domain", title=title, box=MARKDOWN)
    for arm in arms:
        table.add_column(arm, justify="right")
    for domain in domains:
        table.add_row(domain, *(_score(each, domain) for each in arms.values()))
    table.add_row("mean", *(f"{each['mean']:.3f}{SIGNS[each['mean_gap']['verdict']]}" for each in arms.values()))
    return table


def _score(arm: Mapping[str, Any], domain: str) -> str:
    bits = arm["bits"][domain]
    recipe = " ".join(map(str, arm["recipe"][domain])) if "recipe" in arm else ""
    return f"{recipe}  {sum(bits) / len(bits):.3f}{SIGNS[arm['gaps'][domain]['verdict']]}"


def _totals(found: Mapping[str, Any]) -> Table:
    table = Table("arm", "won", "tied", "lost", "mean gap", "interval", "seeds", box=MARKDOWN, title=f"Against {BASE}")
    for heading in ("sign test", "FLOPs", "to MHo-IHo", "refused", "own experts' gap"):
        table.add_column(heading, justify="right")
    base = found["arms"][BASE]["flops"]
    for arm, each in found["arms"].items():
        verdicts, gap = [one["verdict"] for one in each["gaps"].values()], each["mean_gap"]
        counts = (str(verdicts.count(verdict)) for verdict in ("win", "tie", "loss"))
        spread = f"{gap['low']:+.4f} to {gap['high']:+.4f}"
        seeds = " ".join(f"{seed:+.4f}" for seed in gap["seeds"])
        cost = f"{each['flops']:.4g}", f"{100 * (each['flops'] / base - 1):+.2f} %", str(each["refused"])
        own = f"{each['own_gap']['mean']:+.4f}" if "own_gap" in each else "-"
        table.add_row(arm, *counts, f"{gap['mean']:+.4f}", spread, seeds, f"{each['sign_test']:.3f}", *cost, own)
    return table


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines, both, way = [], found["best of two"], found["permutations"]
    if both:
        verdicts = [*both["verdicts"].values()]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in ("win", "tie", "loss"))
        rule = "supported" if both["supported"] else "not supported"
        lines += [f"best of two (corrected): {counts}; sign test {both['sign_test']:.3f}: {rule}"]
        lines += [f"the paper's way of counting: {sum(both['lower'].values())} of {len(verdicts)}"]
    if way:
        behind = f"{100 * way['behind']:.2f} % behind, {'' if way['better_than_mean'] else 'not '}better than the mean"
        lines += [f"sizes of {', '.join(way['domains'])}: predicted {way['predicted']}, best {way['best']}, {behind}"]
    return lines

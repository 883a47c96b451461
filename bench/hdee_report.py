"""What the cells of bench/hdee.py came to: scores, gaps, and verdicts by its decision rule; for JSON, as tables in
Markdown, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.box import MARKDOWN
from rich.console import RenderableType
from rich.table import Table

from bench.hdee_setting import BASE, SIZES, Arms, modes
from bench.hdee_train import cell_of, sheets, standing
from pier_coordinator.experts.difficulty import steadiness
from pier_node.experts.comparison import gather, losses
from pier_node.experts.mixture import Array
from pier_node.experts.sheet import ENDING, load_sheet

METHOD = "decay"
CHALLENGERS = "MHo-IHe", "MHe-IHo"
BEST = "best of two"
Scores = dict[str, Array]
"""By domain, bits per byte, [seeds, rows]."""
DRAWS = 2000
LEVEL, OF_TWO = 0.95, 0.975
"""Of an interval; of each of two, the better of which counts (Bonferroni)."""

Verdict = Literal["win", "tie", "loss"]

GROUPS = {"excluded": " Excluded from training.", "private": " Private.", "shared": " Shared."}
SIGNS = {"win": " ✓", "tie": "", "loss": " ✗"}


@dataclass(frozen=True)
class Gap:
    """Bits per byte that an arm has more than another: the seeds' mean, its interval, and each seed's."""

    mean: float
    low: float
    high: float
    seeds: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        """A win or a loss if the interval has no 0 in it and all seeds agree."""
        if self.high < 0 and max(self.seeds) < 0:
            return "win"
        return "loss" if self.low > 0 and min(self.seeds) > 0 else "tie"


def gap(own: Sequence[Array], other: Sequence[Array], level: float = LEVEL) -> Gap:
    """The gap in the mean of some domains, which count alike.

    Args:
        own, other: bits per byte of each domain, [seeds, rows]; rows are the same in both.
    """
    random = np.random.default_rng(0)
    gaps = [one - two for one, two in zip(own, other, strict=True)]
    seeds = np.mean([each.mean(axis=1) for each in gaps], axis=0)
    drawn = np.zeros(DRAWS)
    for each in gaps:
        rows = each.mean(axis=0)
        drawn += rows[random.integers(0, len(rows), (DRAWS, len(rows)))].mean(axis=1) / len(gaps)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Gap(float(seeds.mean()), float(low), float(high), tuple(seeds.tolist()))


def best_of_two(one: Gap, other: Gap) -> Verdict:
    """Of two arms, both with intervals of the level OF_TWO, against the same third one."""
    verdicts = {one.verdict, other.verdict}
    if "win" in verdicts:
        return "win"
    return "loss" if verdicts == {"loss"} else "tie"


def sign_test(verdicts: Sequence[Verdict]) -> float:
    """The chance of so many wins or more among wins and losses, were both as likely."""
    wins, losses = verdicts.count("win"), verdicts.count("loss")
    ways = sum(math.comb(wins + losses, count) for count in range(wins, wins + losses + 1))
    return float(ways / 2 ** (wins + losses))


def report(
    arms: Arms, ensembles: Mapping[str, Sequence[Mapping[str, Path]]], sizes: Sequence[Mapping[tuple[str, str], Path]]
) -> dict[str, Any]:
    """All of it.

    Args:
        ensembles: by arm, for each seed the cell of each domain's expert, also of those that were refused.
        sizes: for each seed the cells of the permuted domains, by domain and size; none: they are not there.
    """
    mixed = {arm: stacked([mixture_of(each) for each in seeds]) for arm, seeds in ensembles.items()}
    own = {arm: stacked([_own(each) for each in seeds]) for arm, seeds in ensembles.items() if arm in modes()}
    judged = {BEST: arms.setting.domains}
    if arms.setting.excluded:
        judged[f"{BEST}, excluded"] = arms.setting.excluded
    return {
        "setting": asdict(arms.setting),
        "torch": torch.__version__,
        "difficulty": _difficulty(arms),
        "arms": {arm: _arm(arms, arm, ensembles[arm], mixed, own) for arm in ensembles},
        **{name: _both(mixed, domains) if {*CHALLENGERS} <= {*mixed} else None for name, domains in judged.items()},
        "permutations": _permuted(arms, sizes) if sizes else None,
    }


def _arm(
    arms: Arms, arm: str, seeds: Sequence[Mapping[str, Path]], mixed: Mapping[str, Scores], own: Mapping[str, Scores]
) -> dict[str, Any]:
    cells = [cell_of(place) for places in seeds for place in places.values()]
    found = {
        "flops": sum(cell.flops for cell in cells) / len(seeds),
        "planned_flops": arms.flops(arm),
        "refused": sum(not cell.accepted for cell in cells),
        **compared(mixed[arm], mixed[BASE], arms.setting.domains),
    }
    for name, domains in arms.setting.groups().items():
        found[name] = compared(mixed[arm], mixed[BASE], domains)
    if arm in own:
        found["recipe"] = {domain: [job.size, job.steps] for domain, job in arms.jobs(arm, 1).items()}
        alone, others = own[arm], own[BASE]
        found["own"] = {domain: rows.mean(axis=1).tolist() for domain, rows in alone.items()}
        found["own_mean"] = float(np.mean([rows.mean() for rows in alone.values()]))
        found["own_gap"] = _told(gap([*alone.values()], [*others.values()]))
    return found


def compared(scores: Scores, base: Scores, domains: Sequence[str]) -> dict[str, Any]:
    """An arm's scores on some domains, and its gaps to the base there."""
    gaps = {domain: gap([scores[domain]], [base[domain]]) for domain in domains}
    return {
        "bits": {domain: scores[domain].mean(axis=1).tolist() for domain in domains},
        "mean": float(np.mean([scores[domain].mean() for domain in domains])),
        "gaps": {domain: _told(each) for domain, each in gaps.items()},
        "mean_gap": _told(gap([scores[domain] for domain in domains], [base[domain] for domain in domains])),
        "sign_test": sign_test([each.verdict for each in gaps.values()]),
    }


def _both(mixed: Mapping[str, Scores], domains: Sequence[str]) -> dict[str, Any]:
    verdicts, lower = {}, {}
    for domain in domains:
        one, other = (gap([mixed[arm][domain]], [mixed[BASE][domain]], OF_TWO) for arm in CHALLENGERS)
        verdicts[domain], lower[domain] = best_of_two(one, other), min(one.mean, other.mean) < 0
    supported = sign_test([*verdicts.values()])
    return {"verdicts": verdicts, "lower": lower, "sign_test": supported, "supported": supported < 0.05}


def _permuted(arms: Arms, sizes: Sequence[Mapping[tuple[str, str], Path]]) -> dict[str, Any]:
    """What every way of giving three domains three sizes came to. They are in the order in which size should pay."""
    names, predicted = arms.permuted, SIZES
    bits = {key: float(np.mean([_of_cell(seed[key], key[0]).mean() for seed in sizes])) for key in sizes[0]}
    ways = {"".join(order): float(np.mean([bits[each] for each in zip(names, order)])) for order in permutations(SIZES)}
    best = min(ways, key=lambda way: ways[way])
    return {
        "domains": names,
        "bits": {f"{name} {size}": value for (name, size), value in bits.items()},
        "ways": ways,
        "predicted": predicted,
        "best": best,
        "behind": ways[predicted] / ways[best] - 1,
        "better_than_mean": ways[predicted] < float(np.mean([*ways.values()])),
    }


def _difficulty(arms: Arms) -> dict[str, Any]:
    found = arms.planning.difficulty
    gains = {"size": found.size, "steps": found.step}
    told = {
        key: (gain.value / gain.value.mean(), steadiness(gain, found.loss, arms.planning.task.given))
        for key, gain in gains.items()
    }
    return {
        domain: {key: [float(pays[index]), float(steady[index])] for key, (pays, steady) in told.items()}
        for index, domain in enumerate(arms.setting.domains)
    }


def mixture_of(trained: Mapping[str, Path]) -> dict[str, Array]:
    """By domain, bits per byte of each row, [rows]; parents stand in for refused experts, a chain's last for all."""
    followed = {cell_of(place).after for place in trained.values()}
    found = gather(sheets({name: standing(place) for name, place in trained.items() if place.name not in followed}))
    return {domain: _bits(losses(scored)[0][METHOD], scored.test.shape[2]) for domain, scored in found.items()}


def _own(trained: Mapping[str, Path]) -> dict[str, Array]:
    """The same, of the domain's own expert alone."""
    return {domain: _of_cell(standing(place), domain) for domain, place in trained.items()}


def _of_cell(place: Path, domain: str) -> Array:
    (path,) = place.glob(f"*.{domain}.test{ENDING}")
    log_probs = load_sheet(path).log_probs.astype(np.float64)
    return _bits(-log_probs.sum(axis=1), log_probs.shape[1])


def _bits(nats: Array, tokens: int) -> Array:
    return np.asarray(nats / (tokens * math.log(2)))


def stacked(seeds: Sequence[Mapping[str, Array]]) -> Scores:
    """By domain, [seeds, rows], of what each seed has by domain, [rows]."""
    return {domain: np.stack([found[domain] for found in seeds]) for domain in seeds[0]}


def _told(found: Gap) -> dict[str, Any]:
    return {**asdict(found), "verdict": found.verdict}


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
            spread = [[its["mean"] - its["low"] for its in gaps], [its["high"] - its["mean"] for its in gaps]]
            means = [its["mean"] for its in gaps]
            (line, *_) = axis.errorbar(means, places, xerr=spread, fmt="o", markersize=4, capsize=2, label=arm)
            for place, its in zip(places, gaps):
                axis.plot(its["seeds"], [place] * len(its["seeds"]), "|", color=line.get_color(), alpha=0.6)
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
        verdicts, its = [one["verdict"] for one in each["gaps"].values()], each["mean_gap"]
        counts = (str(verdicts.count(verdict)) for verdict in ("win", "tie", "loss"))
        spread = f"{its['low']:+.4f} to {its['high']:+.4f}"
        seeds = " ".join(f"{seed:+.4f}" for seed in its["seeds"])
        cost = f"{each['flops']:.4g}", f"{100 * (each['flops'] / base - 1):+.2f} %", str(each["refused"])
        own = f"{each['own_gap']['mean']:+.4f}" if "own_gap" in each else "-"
        table.add_row(arm, *counts, f"{its['mean']:+.4f}", spread, seeds, f"{each['sign_test']:.3f}", *cost, own)
    return table


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines, way = list[str](), found["permutations"]
    for name, both in found.items():
        if not name.startswith(BEST) or not both:
            continue
        verdicts = [*both["verdicts"].values()]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in ("win", "tie", "loss"))
        rule = "supported" if both["supported"] else "not supported"
        lines += [f"{name} (corrected): {counts}; sign test {both['sign_test']:.3f}: {rule}"]
        lines += [f"the paper's way of counting: {sum(both['lower'].values())} of {len(verdicts)}"]
    if way:
        behind = f"{100 * way['behind']:.2f} % behind, {'' if way['better_than_mean'] else 'not '}better than the mean"
        lines += [f"sizes of {', '.join(way['domains'])}: predicted {way['predicted']}, best {way['best']}, {behind}"]
    return lines

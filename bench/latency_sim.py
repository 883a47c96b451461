"""What does it cost if all sites wait for all others? NoLoCo's pairs against DiLoCo's all-reduce, by simulation.

    python -m bench.latency_sim [--quick] [--json FILE] [--plot FILE.png]

The first two tables are those of the paper (arXiv 2506.10911, Fig. 5), which ignore the time to send bytes. The third
adds it: every site has one link with the same bandwidth each way, an all-reduce is bandwidth-bound (2P(N − 1)/N,
pipelined), a pair swaps P both ways at once, and step times vary as in the second table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.latency_model import Case, barrier_over_pairs, sigma_of, slower_of_two, tree_over_pair, utilisation

SPREADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
TREE_SITES = (4, 16, 64, 256, 1024, 4096)
STEPS = (3, 5, 10, 20, 50, 100)
SITES = (2, 4, 16, 64, 256, 1024, 4096)
MBIT = (20, 50, 200, 1000)
CODECS = {"none": 32.0, "bf16": 16.0, "int8": 8.25, "int4": 4.25}
"""Bits per value; int8 and int4 with a fp32 scale for every 128 values."""


@dataclass(frozen=True)
class Effort:
    """How much is simulated; a site's steps are drawn one by one."""

    leaves: int = 1 << 22
    """Leaves of trees, over all samples of an entry."""
    rounds: int = 500
    runs: int = 4
    wan_rounds: int = 50
    most_sites: int = 4096


QUICK = Effort(leaves=1 << 18, rounds=60, runs=1, wan_rounds=10, most_sites=256)
WAN: dict[str, Any] = {"parameters": 124e6, "latency": 0.04, "step_seconds": 1.0, "inner_steps": 50}
"""GPT-2 small at a second a step, 40 ms one way."""


def tree_table(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """Fig. 5A: a row for each spread of message times."""
    dice, rows = np.random.default_rng(seed), []
    for spread in SPREADS:
        sites = [count for count in TREE_SITES if count <= effort.most_sites]
        ratios = {count: tree_over_pair(count, spread, max(effort.leaves // count, 64), dice) for count in sites}
        rows.append({"r": spread, "ratios": ratios, "slower_of_two": slower_of_two(sigma_of(spread))})
    return rows


def blocking_table(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """Fig. 5B: a row for each number of sites."""
    dice = np.random.default_rng(seed)
    rounds, runs = effort.rounds, effort.runs
    return [
        {"sites": sites, "ratios": {steps: barrier_over_pairs(sites, steps, rounds, dice, runs) for steps in STEPS}}
        for sites in SITES
        if sites <= effort.most_sites
    ]


def wan_table(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """Utilisation and bytes: a row for each number of sites, bandwidth and codec."""
    setting = {**WAN, "rounds": effort.wan_rounds}
    sites = [count for count in (4, 16, 64, 1024, 4096) if count <= effort.most_sites]
    return [
        utilisation(Case(count, mbit * 1e6, codec, CODECS[codec]), setting, np.random.default_rng([seed, count]))
        for count, mbit, codec in product(sites, MBIT, CODECS)
    ]


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the three tables."""
    trees = Table("std / mean", title="Time of a tree all-reduce over that of a pair, by sites", title_justify="left")
    for sites in results["tree"][0]["ratios"]:
        trees.add_column(str(sites), justify="right")
    trees.add_column("slower of 2", justify="right")
    for row in results["tree"]:
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"].values()]
        trees.add_row(f"{row['r']:.1f}", *ratios, f"{row['slower_of_two']:.4f}")
    blocking = Table("sites", title="Time of DiLoCo over that of NoLoCo, without bytes, by H", title_justify="left")
    for steps in STEPS:
        blocking.add_column(str(steps), justify="right")
    for row in results["blocking"]:
        blocking.add_row(str(row["sites"]), *(f"{ratio:.3f}" for ratio in row["ratios"].values()))
    console.print(trees, blocking, _wan(results["wan"]), sep="\n")


def _wan(rows: list[dict[str, Any]]) -> Table:
    title = "Utilisation, DiLoCo then NoLoCo: {parameters:.3g} parameters, {step_seconds} s a step, H = {inner_steps}"
    table = Table("sites", "Mbit/s", title=title.format(**WAN), title_justify="left")
    for codec, bits in CODECS.items():
        table.add_column(f"{codec}, {bits:g} bits", justify="right")
    cells = {(row["sites"], row["mbit"], row["codec"]): row for row in rows}
    for sites, mbit in dict.fromkeys((sites, mbit) for sites, mbit, _ in cells):
        found = [cells[sites, mbit, codec] for codec in CODECS]
        used = [f"{row['diloco_utilisation']:.1%}  {row['noloco_utilisation']:.1%}" for row in found]
        table.add_row(str(sites), f"{mbit:.0f}", *used)
    return table


def plot(results: dict[str, Any], file: Path) -> None:
    """The two published figures, and utilisation over sites at 50 Mbit/s."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (trees, blocking, wan) = pyplot.subplots(1, 3, figsize=(17, 5))
    for row in results["tree"]:
        trees.plot(list(row["ratios"]), list(row["ratios"].values()), marker="o", label=f"std / mean = {row['r']}")
    trees.set(xscale="log", xlabel="sites", ylabel="tree all-reduce / pair")
    for steps in STEPS:
        points = [(row["sites"], row["ratios"][steps]) for row in results["blocking"]]
        blocking.plot(*zip(*points, strict=True), marker="o", label=f"H = {steps}")
    blocking.set(xscale="log", xlabel="sites", ylabel="DiLoCo / NoLoCo, without bytes")
    for codec, (method, style) in product(CODECS, (("diloco", "--"), ("noloco", "-"))):
        rows = [row for row in results["wan"] if row["codec"] == codec and row["mbit"] == 50]
        used = [row[f"{method}_utilisation"] for row in rows]
        colour = f"C{list(CODECS).index(codec)}"
        wan.plot([row["sites"] for row in rows], used, style, color=colour, marker="o", label=f"{method} {codec}")
    wan.set(xscale="log", xlabel="sites", ylabel="utilisation at 50 Mbit/s", ylim=(0, 1))
    for axes in (trees, blocking, wan):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few samples and at most 256 sites: seconds, and no evidence.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves here.")
@click.option("--seed", default=1, show_default=True, help="Of all that is drawn.")
def main(quick: bool, json_file: Path | None, plot_file: Path | None, seed: int) -> None:
    """Simulate, and print the tables."""
    effort = QUICK if quick else Effort()
    tables = {"tree": tree_table, "blocking": blocking_table, "wan": wan_table}
    results: dict[str, Any] = {name: table(effort, seed) for name, table in tables.items()}
    show(Console(), results)
    if json_file:
        json_file.write_text(json.dumps({"seed": seed, "wan_setting": WAN, **results}, indent=1) + "\n")
    if plot_file:
        plot(results, plot_file)


if __name__ == "__main__":
    main()

"""What do faults cost in loss, at equal tokens?

    python -m bench.goodput_loss [--seeds 1,2,3] [--tokens N] [--mean S] [--again] [--json FILE]

The sites and faults of bench/goodput.py, with the model and text of bench/convergence.py's setting `short`. For each
seed (of the weights, the data and the faults) the sites train without faults, and under faults until the committed
model has the same tokens. The loss is the sites' own, of the committed model on the validation split, and is
interpolated between the validations before and after that many tokens. The learning rate stays constant after the
warmup: it would otherwise fall with the steps, of which sites that are killed need more for the same tokens.

With --again, each seed also trains without faults a second time, which shows how far two such runs differ: what a
round holds depends on when sites arrive.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.convergence_grid import SETTINGS
from bench.goodput import come_together, strike, supervise
from bench.goodput_figures import Commit, schedule
from bench.goodput_sites import ENDLESS, INNER_STEPS, Site, running
from bench.tiny_run import Keys, written

SITES = 3
RATE = 2e-3
"""The learning rate and, below, the outer ones that were best with diloco in bench/convergence.py."""
OUTER: Keys = {"algorithm": "diloco", "inner_steps": INNER_STEPS, "overlap": True, "momentum": 0.8, "lr": 0.8}
EVERY = 5
"""Rounds between validations."""
LONGEST = 900.0
"""Seconds that a run may take."""
WAYS = ("no faults", "killed", "no faults, again")
GOAL = 0.005


@dataclass(frozen=True)
class Run:
    """One run, when its model had the tokens that were asked for.

    Attributes:
        loss: on the validation split, nats a token.
        first: the first loss that was measured.
        kills: of sites.
        seconds: since the sites had come together.
    """

    way: str
    seed: int
    loss: float
    first: float
    kills: int
    rounds: int
    members: float
    seconds: float


def run_text(seed: int) -> str:
    """The run.toml."""
    like = SETTINGS["short"]
    model = {"dim": like.dim, "layers": like.layers, "heads": 4, "ffn_dim": like.ffn_dim, "context": like.context}
    rates = {"lr": RATE, "min_lr": RATE, "warmup_steps": like.warmup_steps, "total_steps": ENDLESS}
    validation = {"eval_every": EVERY, "eval_batches": 4 * like.eval_batches}
    return written(
        {
            "run": {"sites": SITES, "seed": seed},
            "model": {"preset": "llama-1m", **model},
            "inner": {**rates, "batch_size": like.batch_size, "precision": "fp32", **validation},
            "outer": OUTER,
        }
    )


def curve(commits: Sequence[Commit]) -> dict[int, float]:
    """Loss of the committed model by its tokens, after each round that is validated."""
    known = (each for each in commits if each.round % EVERY == 0 and math.isfinite(each.loss))
    return {each.tokens: each.loss for each in sorted(known, key=lambda each: each.tokens)}


def measure(way: str, seed: int, tokens: int, mean: float) -> Run:
    """Train until the committed model has so many tokens. Raises RuntimeError: it takes too long."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), run_text(seed), SITES) as sites:
        come_together(sites)
        begun = time.time()
        for fault in schedule(seed, SITES, mean, LONGEST) if way == "killed" else ():
            if _trained(sites, tokens, begun + fault.at):
                break
            strike([sites[fault.site]])
        if not _trained(sites, tokens, begun + LONGEST):
            raise RuntimeError(f"fewer than {tokens:,} tokens in {LONGEST:.0f} s:\n\n{sites[0].tail()}")
        took, commits = time.time() - begun, [commit for site in sites for commit in site.commits()]
    losses, rounds = curve(commits), {commit.round: commit.members for commit in commits if commit.tokens <= tokens}
    loss = float(np.interp(tokens, list(losses), list(losses.values())))
    kills = sum(len(site.killed) for site in sites)
    return Run(way, seed, loss, next(iter(losses.values())), kills, len(rounds), fmean(rounds.values()), took)


def _trained(sites: Sequence[Site], tokens: int, until: float) -> bool:
    """Supervise until then, or until a model with so many tokens has been validated, and say whether one has."""
    while not any(count >= tokens for site in sites for count in curve(site.commits())):
        if time.time() >= until:
            return False
        supervise(sites, min(until, time.time() + 1.0))
    return True


def excesses(runs: Mapping[str, Run]) -> list[float]:
    """By how much the losses of the other ways are above that of the same seed without faults, as fractions."""
    first, *others = runs.values()
    return [run.loss / first.loss - 1 for run in others]


def table(found: Mapping[int, Mapping[str, Run]], tokens: int, mean: float) -> Table:
    """Losses by seed, and in the last row their mean and standard deviation."""
    title = f"validation loss at {tokens:,} tokens; {SITES} sites, each killed every {mean:g} s on average"
    shown, ways = (
        Table("seed", title=title, caption=f"nats a token; goal: within {GOAL:.1%}"),
        next(iter(found.values())),
    )
    for heading in (*ways, *(f"{way}: excess" for way in [*ways][1:]), "kills", "rounds", "members", "first loss"):
        shown.add_column(heading, justify="right")
    for seed, runs in found.items():
        plain, killed = runs["no faults"], runs["killed"]
        shown.add_row(
            str(seed),
            *(f"{run.loss:.4f}" for run in runs.values()),
            *(f"{over:+.2%}" for over in excesses(runs)),
            str(killed.kills),
            f"{plain.rounds}, {killed.rounds}",
            f"{plain.members:.2f}, {killed.members:.2f}",
            f"{plain.first:.2f}",
        )
    if len(found) > 1:
        losses = zip(*([run.loss for run in runs.values()] for runs in found.values()), strict=True)
        over = zip(*map(excesses, found.values()), strict=True)
        shown.add_row(
            "mean ± std",
            *(f"{fmean(each):.4f} ± {stdev(each):.4f}" for each in losses),
            *(f"{fmean(each):+.2%} ± {stdev(each):.2%}" for each in over),
        )
    return shown


@click.command()
@click.option("--seeds", default="1,2,3", show_default=True, help="Of weights, data and faults.")
@click.option("--tokens", default=1_000_000, show_default=True, help="In the committed model.")
@click.option("--mean", default=15.0, show_default=True, help="Seconds between two faults of a site, on average.")
@click.option("--again", is_flag=True, help="Train without faults a second time, too.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(seeds: str, tokens: int, mean: float, again: bool, json_file: Path | None) -> None:
    """Measure what faults cost in loss."""
    console, found = Console(), dict[int, dict[str, Run]]()
    for seed in map(int, seeds.split(",")):
        runs = {}
        for way in WAYS if again else WAYS[:2]:
            with console.status(f"seed {seed}, {way}"):
                runs[way] = measure(way, seed, tokens, mean)
        found[seed] = runs
        console.print(table(found, tokens, mean))
        if json_file:
            records = [asdict(run) for each in found.values() for run in each.values()]
            json_file.write_text(json.dumps({"tokens": tokens, "mean": mean, "runs": records}, indent=1) + "\n")


if __name__ == "__main__":
    cli()

"""What do faults cost in loss, at equal tokens?

    python -m bench.goodput_loss [--seeds 1,2,3] [--steps N] [--mean S] [--overlap] [--json FILE]

The sites and faults of bench/goodput.py, with the model and text of bench/convergence.py's setting `short`. For each
seed (of the weights, the data and the faults) the sites first train under faults, for so many inner steps. Sites that
are killed bring fewer tokens to these, so the sites then train without faults for the steps that give as many tokens.
Last, they train without faults for as many steps, and so with more tokens. The learning rate falls to a tenth in each
run. What is compared is the sites' own last validation, which is of the committed model.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import click
from rich.console import Console
from rich.table import Table

from bench.convergence_grid import SETTINGS
from bench.goodput import come_together, strike, supervise
from bench.goodput_figures import Fault, schedule
from bench.goodput_sites import INNER_STEPS, Site, running
from bench.tiny_run import Keys, written
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import total_rounds

SITES = 3
RATE = 2e-3
"""The learning rate and, below, the outer ones that were best with diloco in bench/convergence.py."""
OUTER: Keys = {"algorithm": "diloco", "inner_steps": INNER_STEPS, "momentum": 0.8, "lr": 0.8}
LONGEST = 900.0
"""Seconds that a run may take."""
GOAL = 0.005


@dataclass(frozen=True)
class Run:
    """One run, at its end.

    Attributes:
        tokens: in the committed model.
        loss: of the committed model on the validation split, nats a token.
        kills: of sites.
        members: of a round, in the mean.
        seconds: since the sites had come together.
    """

    steps: int
    tokens: int
    loss: float
    kills: int
    rounds: int
    members: float
    seconds: float


@dataclass(frozen=True)
class Runs:
    """The runs of a seed: under faults, and without at equal tokens and at equal steps."""

    seed: int
    killed: Run
    tokens: Run
    steps: Run

    @property
    def excesses(self) -> tuple[float, float]:
        """By how much the loss is greater under faults than at equal tokens and at equal steps, as fractions."""
        return self.killed.loss / self.tokens.loss - 1, self.killed.loss / self.steps.loss - 1


def run_text(seed: int, steps: int, overlap: bool) -> str:
    """The run.toml."""
    like = SETTINGS["short"]
    rates = {"lr": RATE, "min_lr": like.end * RATE, "warmup_steps": like.warmup_steps, "total_steps": steps}
    validation = {"eval_every": 0, "eval_batches": 4 * like.eval_batches}
    return written(
        {
            "run": {"sites": SITES, "seed": seed},
            "model": like.model,
            "inner": {**rates, "batch_size": like.batch_size, "precision": "fp32", **validation},
            "outer": {**OUTER, "overlap": overlap},
        }
    )


def measure(run: str, faults: Iterable[Fault] = ()) -> Run:
    """Train to the end of a run. Raises RuntimeError: it takes too long."""
    config = RunConfig.model_validate(tomllib.loads(run))
    last = total_rounds(config)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), run, SITES) as sites:
        come_together(sites)
        begun = time.time()
        for fault in faults:
            if _over(sites, last, begun + fault.at):
                break
            strike([sites[fault.site]])
        if not _over(sites, last, begun + LONGEST):
            raise RuntimeError(f"the run is not over in {LONGEST:.0f} s:\n\n{sites[0].tail()}")
        took, commits = time.time() - begun, [commit for site in sites for commit in site.commits()]
    end = next(commit for commit in commits if commit.round == last and math.isfinite(commit.loss))
    members = {commit.round: commit.members for commit in commits if commit.round}
    kills = sum(len(site.killed) for site in sites)
    steps = config.inner.total_steps
    return Run(steps, end.tokens, end.loss, kills, len(members), fmean(members.values()), took)


def _over(sites: Sequence[Site], last: int, until: float) -> bool:
    """Supervise until then, or until a site has validated the last round, and say whether one has."""
    while not any(it.round == last and math.isfinite(it.loss) for site in sites for it in site.commits()):
        if time.time() >= until:
            return False
        supervise(sites, min(until, time.time() + 1.0))
    return True


def runs_of(seed: int, steps: int, mean: float, overlap: bool) -> Runs:
    """Train under faults, without for the steps that give as many tokens, and without for as many steps."""
    killed = measure(run_text(seed, steps, overlap), schedule(seed, SITES, mean, LONGEST))
    equal = round(killed.tokens / (SITES * SETTINGS["short"].batch_size * SETTINGS["short"].context))
    plain = (measure(run_text(seed, each, overlap)) for each in (equal, steps))
    return Runs(seed, killed, *plain)


def table(found: Sequence[Runs], mean: float) -> Table:
    """Losses by seed, and in the last row their mean and standard deviation."""
    title = f"validation loss; {SITES} sites, each killed every {mean:g} s on average"
    caption = f"nats a token; killed, equal tokens, equal steps; goal: within {GOAL:.1%} at equal tokens"
    shown = Table("seed", title=title, caption=caption)
    for heading in ("kills", "tokens", "steps", "members", "killed", "equal tokens", "equal steps", "excess"):
        shown.add_column(heading, justify="right")
    for it in found:
        every = (it.killed, it.tokens, it.steps)
        shown.add_row(
            str(it.seed),
            str(it.killed.kills),
            ", ".join(f"{run.tokens:,}" for run in every),
            ", ".join(str(run.steps) for run in every),
            ", ".join(f"{run.members:.2f}" for run in every),
            *(f"{run.loss:.4f}" for run in every),
            ", ".join(f"{over:+.2%}" for over in it.excesses),
        )
    if len(found) > 1:
        losses = zip(*((it.killed.loss, it.tokens.loss, it.steps.loss) for it in found), strict=True)
        over = zip(*(it.excesses for it in found), strict=True)
        shown.add_row(
            *("mean ± std", "", "", "", ""),
            *(f"{fmean(each):.4f} ± {stdev(each):.4f}" for each in losses),
            ", ".join(f"{fmean(each):+.2%} ± {stdev(each):.2%}" for each in over),
        )
    return shown


@click.command()
@click.option("--seeds", default="1,2,3", show_default=True, help="Of weights, data and faults.")
@click.option("--steps", default=800, show_default=True, help="Inner steps of the run under faults.")
@click.option("--mean", default=15.0, show_default=True, help="Seconds between two faults of a site, on average.")
@click.option("--overlap", is_flag=True, help="Train with outer.overlap: losses depend on how fast the machine is.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(seeds: str, steps: int, mean: float, overlap: bool, json_file: Path | None) -> None:
    """Measure what faults cost in loss."""
    console, found = Console(), list[Runs]()
    for seed in map(int, seeds.split(",")):
        with console.status(f"seed {seed}"):
            found.append(runs_of(seed, steps, mean, overlap))
        console.print(table(found, mean))
        if json_file:
            records = [asdict(it) | {"excesses": it.excesses} for it in found]
            json_file.write_text(json.dumps({"mean": mean, "overlap": overlap, "runs": records}, indent=1) + "\n")


if __name__ == "__main__":
    cli()

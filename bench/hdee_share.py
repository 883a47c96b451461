"""For what share of the compute should sites train one model, before each of them specialises alone?

    python -m bench.hdee_share --cells FOLDER [--steps 6000] [--seeds 1-3] [--json FILE]

Eight sites have a built-in domain each. In every arm a site takes `--steps` steps of one row of 128 bytes. For a share
of them (SHARES, in percent) all sites train one model, in a run with Pier's rounds (bench/simulation.py). After it,
either each site specialises alone: it trains on, on its own domain, without any exchange, and the ensemble of these
experts is scored as in bench/hdee.py; or all sites continue together, in a second run. So both arms of a share have the
same seed model, text, tokens and FLOPs, and differ only in whether sites still exchange anything. With a share of 0,
experts begin from random weights, and there is one run of all sites. All these models have 0.03 M parameters. One of
0.06 M (WIDER) is trained by all sites in one run, for the same FLOPs and so with fewer steps.

The decision rule is in docs/results.md. Cells that are not in FOLDER yet are trained; an interrupted run resumes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.hdee import span
from bench.hdee_report import SIGNS, compared, mixture_of, stacked
from bench.hdee_setting import Arms, Setting
from bench.hdee_train import CPU, Model, Shop, Texts, cell_of
from bench.simulation import Simulation, Sites
from pier_node.config.run import DataSection, OuterSection, RunConfig, RunSection
from pier_node.outer.schedule import round_plan
from pier_node.trainer.data.sources import HELD_OUT
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.replica import Replica

SETTING = Setting(dim=32, layers=2, ffn_dim=64, excluded=())
SHARES = 0, 25, 50
WIDER = replace(SETTING, dim=48, ffn_dim=96)
RISE = 15
"""The learning rate rises in one of so many steps of a run."""
LATER = 1000
"""Added to the seed that decides which rows sites see, once the seed model is there."""
OUTER = OuterSection.model_validate(
    {"algorithm": "diloco", "start": "sync", "start_fraction": 0.1, "momentum": 0.8, "lr": 0.8}
)
"""What docs/results.md advises for some hundred rounds, with a start for which no site needs the text of another."""
ALONE = OuterSection.model_validate({"algorithm": "diloco", "inner_steps": 1 << 30})
"""No round ends."""
ONE_RUN, FROM_SCRATCH, WIDE = "together after 0 %", "alone after 0 %", "together, wider"
COLUMNS = 220
"""Of the tables, however narrow the terminal."""


class Branch(Shop):
    """The models of one seed and share: what all sites train together at first, and both ways to go on from it.

    Args:
        share: percent of the steps that come first.
        steps: of every site, all in all.
    """

    def __init__(self, arms: Arms, texts: Texts, seed: int, folder: Path, share: int, steps: int) -> None:
        super().__init__(arms, texts, seed, folder)
        self._domains, first = arms.setting.domains, steps * share // 100
        self._run, self._rest = self._lasting(first, seed), self._lasting(steps - first, seed + LATER)

    def experts_alone(self) -> dict[str, Path]:
        """The cell of each domain's expert."""
        places = {name: self._folder / name for name in self._domains}
        if [place for place in places.values() if self._is_missing(place)]:
            self.seed_model()
            config, began = self._divided(self._rest, ALONE, "alone"), time.process_time()
            replica = Replica(config, CPU, workers=1)
            replica.load_weights(self.parent.flat)
            windows = [self._texts.windows(name, config.run.seed, f"alone {name}") for name in self._domains]
            sites = Sites(config, windows, replica)
            sites.train(round_plan(config, 1))
            spent = (time.process_time() - began) / len(places)
            for (name, place), weights in zip(places.items(), sites.weights(), strict=True):
                made = Model(config.model, torch.from_numpy(weights))
                self._keep(place, made, self._cell(config, name, "S", spent, self._judged(name, made, self.parent)))
        return places

    def continued(self) -> dict[str, Path]:
        """The cell of the model with which all sites continue together."""
        place, began = self._folder / "together", time.process_time()
        if self._is_missing(place):
            made = self._mixed(self._rest, self.parent.flat, "together")
            self._keep(place, made, self._cell(self._rest, "together", "S", time.process_time() - began))
        return {"together": place}

    def _mixed(self, config: RunConfig, flat: Tensor, node: str) -> Model:
        """Trained by all sites together."""
        if not config.inner.total_steps:
            return Model(config.model, flat)
        divided = self._divided(config, OUTER, node)
        simulation = Simulation(divided, self._texts.cache, self._domains, begin=flat.numpy())
        simulation.run(config.inner.total_steps, lambda _: None)
        return Model(config.model, torch.from_numpy(simulation.anchor))

    def _lasting(self, steps: int, seed: int) -> RunConfig:
        """A run of so many steps, of which each has one row of every site."""
        config = self._arms.setting.run(seed)
        changed = {"total_steps": steps, "warmup_steps": steps // RISE, "batch_size": len(self._domains)}
        return config.model_copy(update={"inner": config.inner.model_copy(update=changed)})

    def _divided(self, config: RunConfig, outer: OuterSection, name: str) -> RunConfig:
        """The same among the sites."""
        inner = config.inner.model_copy(update={"batch_size": 1})
        run = RunSection(name=name, seed=config.run.seed, sites=len(self._domains))
        data = DataSection(validation=HELD_OUT)
        return config.model_copy(update={"run": run, "data": data, "inner": inner, "outer": outer})


class Seeds:
    """All arms of every seed.

    Args:
        steps: of every site.
    """

    def __init__(self, setting: Setting, cells: Path, steps: int) -> None:
        self._arms, self._wide = Arms(setting), Arms(WIDER)
        self._texts, self._steps, self._folder = Texts(setting, cells / "cache"), steps, cells / f"steps-{steps}"

    def trained(self, seed: int) -> dict[str, dict[str, Path]]:
        """The cells of every arm of a seed, trained if need be."""
        arms, folder = dict[str, dict[str, Path]](), self._folder / f"seed-{seed}"
        for share in SHARES:
            branch = Branch(self._arms, self._texts, seed, folder / str(share), share, self._steps)
            arms[f"together after {share} %"] = branch.continued()
            arms[f"alone after {share} %"] = branch.experts_alone()
            if share:
                arms[f"no more after {share} %"] = {"seed": branch.seed_model()}
        flops = [flops_per_token(each.setting.run(seed).model) for each in (self._arms, self._wide)]
        steps = round(self._steps * flops[0] / flops[1])
        arms[WIDE] = Branch(self._wide, self._texts, seed, folder / "wider", 0, steps).continued()
        return arms


def report(setting: Setting, steps: int, seeds: Sequence[Mapping[str, Mapping[str, Path]]]) -> dict[str, Any]:
    """Bits per byte of all arms, by domain and seed; and the experts of each share against what they have to beat."""
    scores = {arm: stacked([mixture_of(arms[arm]) for arms in seeds]) for arm in seeds[0]}
    rivals = {f"alone after {share} %": (f"together after {share} %", ONE_RUN, FROM_SCRATCH, WIDE) for share in SHARES}
    places = {place for arms in seeds for cells in arms.values() for place in cells.values()}
    return {
        "setting": asdict(setting),
        "steps": steps,
        "torch": torch.__version__,
        "refused": sum(not cell_of(place).accepted for place in places),
        "bits": {
            arm: {name: rows.mean(axis=1).tolist() for name, rows in found.items()} for arm, found in scores.items()
        },
        "against": {
            arm: {
                other: compared(scores[arm], scores[other], setting.domains)
                for other in dict.fromkeys(others)
                if other != arm
            }
            for arm, others in rivals.items()
        },
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """By seed, by domain, and the gaps."""
    bits, seeds = found["bits"], found["setting"]["seeds"]
    by_seed = Table("bits per byte", *(f"seed {seed}" for seed in seeds), "mean", "std", box=MARKDOWN)
    by_domain = Table("domain", *bits, box=MARKDOWN)
    gaps = Table("gap", "won / tied / lost", "mean", "95 % interval", *(f"seed {seed}" for seed in seeds), box=MARKDOWN)
    for arm, domains in bits.items():
        means = [fmean(values) for values in zip(*domains.values(), strict=True)]
        spread = stdev(means) if len(means) > 1 else 0.0
        by_seed.add_row(arm, *(f"{value:.3f}" for value in (*means, fmean(means), spread)))
    for name in found["setting"]["domains"]:
        by_domain.add_row(name, *(f"{fmean(domains[name]):.3f}" for domains in bits.values()))
    for arm, others in found["against"].items():
        for other, its in others.items():
            verdicts, mean = [one["verdict"] for one in its["gaps"].values()], its["mean_gap"]
            counts = " / ".join(str(verdicts.count(each)) for each in ("win", "tie", "loss"))
            interval = f"{mean['low']:+.4f} to {mean['high']:+.4f}"
            told = f"{mean['mean']:+.4f}{SIGNS[mean['verdict']]}"
            gaps.add_row(f"{arm}, to {other}", counts, told, interval, *(f"{each:+.4f}" for each in mean["seeds"]))
    return [by_seed, by_domain, gaps]


@click.command(help=__doc__)
@click.option("--cells", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps what is trained.")
@click.option("--steps", type=click.IntRange(20), default=6000, show_default=True, help="Of every site, in every arm.")
@click.option("--seeds", default="1-3", callback=span, show_default=True, help="First and last seed.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def main(cells: Path, steps: int, seeds: tuple[int, ...], json_file: Path | None) -> None:
    """Train what is missing, and compare."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console, setting = Console(width=COLUMNS), replace(SETTING, seeds=seeds)
    of_seed, made = Seeds(setting, cells, steps), list[dict[str, dict[str, Path]]]()
    for seed in seeds:
        console.log(f"seed {seed}")
        made.append(of_seed.trained(seed))
    found = report(setting, steps, made)
    console.print(*tables(found), sep="\n")
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

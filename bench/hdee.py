"""Is an ensemble of unequal experts better than one of equal experts, at equal compute? The paper says: on 20 of 21.

    python -m bench.hdee --cells FOLDER [--quick] [--seeds 3] [--json FILE] [--plot FILE.png]

What is not in FOLDER yet is trained; a run that was broken off goes on. Written down before the first cell of it was
trained (learning rate and lengths were chosen before, with seed 0 and one domain):

**Design.** The eight built-in domains (parts of Python's library; held-out documents are in no model's training).
Models of 3 layers, dim 64, context 128, bytes: S 0.14 M parameters, M 0.21 M, L 0.29 M (FFN 128, 256, 384: S + L cost
2 M to the FLOP, as the paper's "Small"). For each of three seeds one seed model, S, 600 steps on all domains alike;
all arms branch from it, M and L by widening. The arms are the planner's own recipes, from n-gram difficulty: MHo-IHo
(M, 300 steps of 8 x 128 bytes each), MHo-IHe (M; 225, 300 or 375 steps), MHe-IHo (S, M or L; 300 steps), auto. Equal
cells (domain, size, steps, seed) are trained once. Beside them one dense model that continues from the same seed model
with all domains in every batch, for the FLOPs of all experts together: M, and, trained last, L. The gate holds: an
expert that is refused is replaced by the seed model.

**Compute.** The domain phase of every arm costs the same within 1 %, LM head and attention counted
(trainer/model/cost.py), over executed steps: 8 x 300 x 1024 x 1.57 MFLOP = 3.9e12 for each arm and seed.
The seed model is a line of its own.

**Measure.** Bits per byte on 200 test rows of 128 bytes of each domain at most, of the default mixture (`decay`, prior
fitted on 60 rows of the prior split); the domain's own expert alone is shown beside it. A gap is an arm's minus
MHo-IHo's on the same rows. Its interval (95 %) is a bootstrap over rows of the seeds' mean.

**Hypothesis** (the paper's): the better of MHo-IHe and MHe-IHo beats MHo-IHo on nearly all domains.

**Decision rule.** An arm wins a domain if its interval is below 0 and all three seeds agree in sign, loses it in the
opposite case, and ties otherwise. Best of two: wins if one of both does with intervals of 97.5 % each (Bonferroni),
loses if both lose. The hypothesis is supported if best of two wins more domains than it loses by a sign test at 5 %
(one-sided, without ties); else it is not. The paper's way of counting (lower mean, the better of two, no interval) is
shown as well; among three equal arms it would come to 2/3 of the domains by luck. The same rule holds for auto and
dense, each alone. For the mean over domains: better or worse if the interval has no 0 in it and all seeds agree.

**Sizes permuted** (as a control): for the domains where size pays least, middling and most as
estimated, all six ways of giving them S, M and L; own experts, 300 steps. Wanted: the way that is predicted to be best
is within 1 % of the best in mean bits per byte, and better than the mean of six.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console

from bench.hdee_report import report
from bench.hdee_setting import DENSE, SIZES, Arms, Setting, modes
from bench.hdee_show import plot, tables
from bench.hdee_train import MissingError, Shop, Texts

QUICK = Setting(
    dim=16, layers=1, ffn_dim=16, context=32, steps=(3, 4, 5), seed_steps=4, seed_warmup=1, warmup_steps=1,
    test_rows=8, prior_rows=4,
)  # fmt: skip

Places = dict[str, Path]


def ensemble(shop: Shop, arms: Arms, seed: int, mode: str) -> Places:
    """The cell of each domain's expert in an arm, trained if need be."""
    if mode in DENSE:
        return {"dense": shop.dense(mode[-1])}
    return {domain: shop.expert(job) for domain, job in arms.jobs(mode, seed).items()}


def permutations(shop: Shop, arms: Arms, seed: int) -> dict[tuple[str, str], Path]:
    """The cells of three domains in all sizes, trained if need be."""
    return {(name, size): shop.expert(arms.of_size(name, size, seed)) for name in arms.permuted for size in SIZES}


def work(arms: Arms, shops: dict[int, Shop]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything there is to train, the most important first."""
    for seed, shop in shops.items():
        yield f"seed {seed}", shop.seed_model
        for mode in (*modes(), DENSE[0]):
            yield f"seed {seed}: {mode}", partial(ensemble, shop, arms, seed, mode)
    for seed, shop in shops.items():
        yield f"seed {seed}: permutations", partial(permutations, shop, arms, seed)
    for seed, shop in shops.items():
        yield f"seed {seed}: {DENSE[1]}", partial(ensemble, shop, arms, seed, DENSE[1])


def whole(arms: Arms, shops: dict[int, Shop]) -> tuple[dict[str, list[Places]], list[dict[tuple[str, str], Path]]]:
    """The cells of each arm, and of the permutations, that all seeds have."""
    experts: dict[str, list[Places]] = {}
    sizes: list[dict[tuple[str, str], Path]] = []
    for shop in shops.values():
        shop.trains = False
    for arm in (*modes(), *DENSE):
        with suppress(MissingError):
            experts[arm] = [ensemble(shop, arms, seed, arm) for seed, shop in shops.items()]
    with suppress(MissingError):
        sizes = [permutations(shop, arms, seed) for seed, shop in shops.items()]
    return experts, sizes


@click.command(help=__doc__)
@click.option("--cells", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps what is trained.")
@click.option("--quick", is_flag=True, help="Tiny models and a few steps: no evidence.")
@click.option("--seeds", type=click.IntRange(1, 9), default=3, show_default=True, help="Seeds 1 to this one.")
@click.option("--as-it-is", is_flag=True, help="Train nothing: a table of the arms that all seeds have.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the gaps here.")
def main(cells: Path, quick: bool, seeds: int, as_it_is: bool, json_file: Path | None, plot_file: Path | None) -> None:
    """Train what is missing, and compare."""
    torch.set_num_threads(1)
    console, setting = Console(), replace(QUICK if quick else Setting(), seeds=(*range(1, seeds + 1),))
    arms, texts = Arms(setting), Texts(setting, cells / "cache")
    shops = {seed: Shop(arms, texts, seed, cells / f"seed-{seed}") for seed in setting.seeds}
    for name, train in () if as_it_is else work(arms, shops):
        console.log(name)
        train()
    found = report(arms, *whole(arms, shops))
    console.print(*tables(found), sep="\n")
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot_file:
        plot(found, plot_file)


if __name__ == "__main__":
    main()

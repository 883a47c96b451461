"""Is an ensemble of unequal experts better than one of equal experts, at equal compute? The paper says: on 20 of 21.

    python -m bench.hdee --cells FOLDER [--quick] [--seeds 1-3] [--arm auto …] [--hand] [--chain] …

Cells that are not in FOLDER yet are trained; an interrupted run resumes. The following was written down before the
first cell was trained (learning rate and lengths were chosen before, with seed 0 and one domain):

**Design.** The eight built-in domains (parts of Python's library; held-out documents are in no model's training).
Models of 3 layers, dim 64, context 128, bytes: S 0.14 M parameters, M 0.21 M, L 0.29 M (FFN 128, 256, 384: S + L cost
2 M to the FLOP, as the paper's "Small"). For each of three seeds one seed model, S, 600 steps on all domains alike;
all arms branch from it, M and L by widening. The arms are the planner's own recipes, from n-gram difficulty: MHo-IHo
(M, 300 steps of 8 x 128 bytes each), MHo-IHe (M; 225, 300 or 375 steps), MHe-IHo (S, M or L; 300 steps), auto. Equal
cells (domain, size, steps, seed) are trained once. For comparison, one dense model continues from the same seed model
with all domains in every batch, for the FLOPs of all experts together: M, and, trained last, L. The gate applies: an
expert that is refused is replaced by the seed model.

**Compute.** The domain phase of every arm costs the same within 1 %, LM head and attention counted
(trainer/model/cost.py), over executed steps: 8 x 300 x 1024 x 1.57 MFLOP = 3.9e12 for each arm and seed. The seed
model is counted separately.

**Measure.** Bits per byte of the default mixture (`decay`, prior fitted on 60 rows of the prior split) on at most 200
test rows of 128 bytes per domain; the domain's own expert alone is also shown. A gap is an arm's minus MHo-IHo's on
the same rows. Its interval (95 %) is a bootstrap over rows of the seeds' mean.

**Hypothesis** (the paper's): the better of MHo-IHe and MHe-IHo beats MHo-IHo on nearly all domains.

**Decision rule.** An arm wins a domain if its interval is below 0 and all three seeds agree in sign, loses it in the
opposite case, and ties otherwise. Best of two wins a domain if either arm does with intervals of 97.5 % each
(Bonferroni), and loses it if both lose. The hypothesis is supported if best of two wins more domains than it loses by
a sign test at 5 % (one-sided, without ties); otherwise it is not. The paper's way of counting (lower mean, the better
of two, no interval) is shown as well; with three equal arms it would give 2/3 of the domains by luck. The same rule
holds for auto and dense, each alone. The mean over domains is better or worse if its interval excludes 0 and all seeds
agree.

**Excluded from training.** Every arm, and the seed model, is also scored on eight domains that no model was trained on
(INSTALLED in hdee_setting.py), by the same mixture and rule, with a prior fitted on rows of their own prior split.
`--installed` swaps the roles: those domains are trained on, and the built-in ones are excluded.

**Private data.** With `--private` the last four of the domains never leave their sites: the seed model and the dense
ones are trained on the other four alone, the dense ones for the FLOPs of all eight experts. An expert sees its own
domain, as always. The arms are MHo-IHo, dense M and the seed model, by the same rule, for the mean of all eight
domains, of the private four and of the shared four. Expected: experts win on the private four by more than they lose
on the others. (Owners who take part in a dense run with `data.dealt = false` do not move their text either. This is
about owners who will not take part in it, or not for as long as it takes.)

**Equal time.** Experts need no link, whereas sites of a dense run wait for theirs. `--dense-share 0.378` gives the
dense models that share of the compute: the share of their time that two sites over 20 Mbit/s trained, with int4 and
overlap at H = 128 (docs/results.md, sites on slow links). The arms are MHo-IHo, auto and dense M; the rule is that of
dense above.

**Classes by hand.** With `--hand` the classes of difficulty are set as in the paper, by a person who looks at the kind
of text (BY_HAND in hdee_setting.py): prose is hard, tables and readers of file formats are easy, other code is in
between. That is as many of each class as the estimate makes of eight domains. The arms are MHo-IHo, MHo-IHe and
MHe-IHo, and the rule is that of the hypothesis, on the domains trained on and on the excluded ones. Classes by hand are
better than estimated ones if the mean gap of an arm is lower in all three seeds. Expected: neither is.

**Chains.** `--chain` is the paper's arrangement: the same classes by hand, one expert for each class, which goes
through the domains of its class in turn, in the order of `domains`. Each of its domains but the last takes the usual
steps, and the ensemble consists of the last experts, three instead of eight. The arms and the rule are those of
`--hand`, against the chains of MHo-IHo. Expected: with three experts each arm is worse than with eight from the seed,
and the heterogeneous arms do not win. (The middle class has four of the eight domains, where the paper has three each.)

**Sizes permuted** (as a control): for the domains where, by the estimate, size pays least, middling and most, all six
ways of giving them S, M and L; own experts, 300 steps. The goal: the assignment in the order of the estimate is within
1 % of the best in mean bits per byte, and better than the mean of the six.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console

from bench.hdee_report import CHALLENGERS, plot, report, tables
from bench.hdee_setting import BASE, BY_HAND, DENSE, SEED_MODEL, SIZES, Arms, Setting, every_arm
from bench.hdee_train import MissingError, Shop, Texts

QUICK = Setting(
    dim=16, layers=1, ffn_dim=16, context=32, steps=(3, 4, 5), seed_steps=4, seed_warmup=1, warmup_steps=1,
    test_rows=8, prior_rows=4,
)  # fmt: skip

Places = dict[str, Path]


def ensemble(shop: Shop, arms: Arms, seed: int, arm: str) -> Places:
    """The cell of each domain's expert in an arm, trained if need be."""
    if arm in DENSE:
        return {"dense": shop.dense(arm[-1])}
    if arm == SEED_MODEL:
        return {"seed": shop.seed_model()}
    return shop.experts(arms.jobs(arm, seed))


def permutations(shop: Shop, arms: Arms, seed: int) -> dict[tuple[str, str], Path]:
    """The cells of three domains in all sizes, trained if need be."""
    return {(name, size): shop.expert(arms.of_size(name, size, seed)) for name in arms.permuted for size in SIZES}


def work(arms: Arms, shops: dict[int, Shop], chosen: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What there is to train for the chosen arms, and if these are all, for the permutations."""
    for seed, shop in shops.items():
        yield f"seed {seed}", shop.seed_model
        for arm in chosen:
            yield f"seed {seed}: {arm}", partial(ensemble, shop, arms, seed, arm)
    for seed, shop in shops.items() if len(chosen) == len(every_arm()) else ():
        yield f"seed {seed}: permutations", partial(permutations, shop, arms, seed)


def whole(
    arms: Arms, shops: dict[int, Shop], chosen: Sequence[str]
) -> tuple[dict[str, list[Places]], list[dict[tuple[str, str], Path]]]:
    """The cells of each arm, and of the permutations, that all seeds have."""
    experts: dict[str, list[Places]] = {}
    sizes: list[dict[tuple[str, str], Path]] = []
    for shop in shops.values():
        shop.trains = False
    for arm in chosen:
        with suppress(MissingError):
            experts[arm] = [ensemble(shop, arms, seed, arm) for seed, shop in shops.items()]
    with suppress(MissingError):
        sizes = [permutations(shop, arms, seed) for seed, shop in shops.items()]
    return experts, sizes


def span(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    """`4-6`: the seeds 4, 5 and 6."""
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last or first).isdigit()):
        raise click.BadParameter(f"{text} is no span of seeds, such as 1-3")
    return (*range(int(first), int(last or first) + 1),)


@click.command(help=__doc__)
@click.option("--cells", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps what is trained.")
@click.option("--quick", is_flag=True, help="Tiny models and a few steps: no evidence.")
@click.option("--seeds", default="1-3", callback=span, show_default=True, help="First and last seed.")
@click.option("--arm", "chosen", type=click.Choice(every_arm()), multiple=True, help="[default: all]")
@click.option("--installed", is_flag=True, help="Train on the domains in files of packages.")
@click.option("--private", is_flag=True, help="Some of the domains are seen by their own experts only.")
@click.option("--hand", is_flag=True, help="Classes of difficulty set by hand.")
@click.option("--chain", is_flag=True, help="The same, and an expert for each class, not for each domain.")
@click.option("--dense-share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Of the experts' compute.")
@click.option("--as-it-is", is_flag=True, help="Train nothing: a table of the arms that all seeds have.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the gaps here.")
def main(
    cells: Path,
    quick: bool,
    seeds: tuple[int, ...],
    chosen: tuple[str, ...],
    installed: bool,
    private: bool,
    hand: bool,
    chain: bool,
    dense_share: float,
    as_it_is: bool,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Train what is missing, and compare."""
    logging.disable(logging.WARNING)  # folders of packages also hold files that are no text
    torch.set_num_threads(1)
    console, setting = Console(), replace(QUICK if quick else Setting(), seeds=seeds, dense_share=dense_share)
    if installed:
        setting = replace(setting, domains=setting.excluded, excluded=setting.domains)
    if private:
        setting = replace(setting, excluded=(), private=setting.domains[len(setting.domains) // 2 :])
    if hand or chain:
        if installed or "auto" in chosen:
            raise click.UsageError("classes by hand are those of the built-in domains, and auto has none")
        setting = replace(setting, by_hand={name: BY_HAND[name] for name in setting.domains}, chain=chain)
        chosen = chosen or CHALLENGERS
    compared = [arm for arm in every_arm() if not chosen or arm in (BASE, *chosen)]
    arms, texts = Arms(setting), Texts(setting, cells / "cache")
    shops = {
        seed: Shop(arms, texts, seed, cells / f"{'private' if private else 'seed'}-{seed}") for seed in setting.seeds
    }
    for name, train in () if as_it_is else work(arms, shops, compared):
        console.log(name)
        train()
    found = report(arms, *whole(arms, shops, compared))
    console.print(*tables(found), sep="\n")
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot_file:
        plot(found, plot_file)


if __name__ == "__main__":
    main()

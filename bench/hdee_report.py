"""Turns the cells of bench/hdee.py into every arm's scores, gaps and verdicts, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.hdee_setting import BASE, SIZES, Arms, modes
from bench.hdee_train import SEED_MODEL, cell_of, sheets
from bench.hdee_verdict import OF_TWO, Gap, best_of_two, gap, sign_test
from pier_coordinator.experts.difficulty import steadiness
from pier_node.experts.comparison import gather, losses
from pier_node.experts.mixture import Array
from pier_node.experts.sheet import ENDING, load_sheet

METHOD = "decay"
CHALLENGERS = "MHo-IHe", "MHe-IHo"
Scores = dict[str, Array]
"""By domain, bits per byte, [seeds, rows]."""


def report(
    arms: Arms, ensembles: Mapping[str, Sequence[Mapping[str, Path]]], sizes: Sequence[Mapping[tuple[str, str], Path]]
) -> dict[str, Any]:
    """All of it.

    Args:
        ensembles: by arm, for each seed the cell of each domain's expert, also of those that were refused.
        sizes: for each seed the cells of the permuted domains, by domain and size; none: they are not there.
    """
    mixed = {arm: _stacked([mixture_of(each) for each in seeds]) for arm, seeds in ensembles.items()}
    own = {
        arm: _stacked([_own(_members(each)) for each in seeds]) for arm, seeds in ensembles.items() if arm in modes()
    }
    return {
        "setting": asdict(arms.setting),
        "torch": torch.__version__,
        "difficulty": _difficulty(arms),
        "arms": {arm: _arm(arms, arm, ensembles[arm], mixed, own) for arm in ensembles},
        "best of two": _both(mixed, arms.setting.domains) if {*CHALLENGERS} <= {*mixed} else None,
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
        **_compared(mixed[arm], mixed[BASE], arms.setting.domains),
    }
    for name, domains in arms.setting.groups().items():
        found[name] = _compared(mixed[arm], mixed[BASE], domains)
    if arm in own:
        found["recipe"] = {domain: [job.size, job.steps] for domain, job in arms.jobs(arm, 1).items()}
        alone, others = own[arm], own[BASE]
        found["own"] = {domain: rows.mean(axis=1).tolist() for domain, rows in alone.items()}
        found["own_mean"] = float(np.mean([rows.mean() for rows in alone.values()]))
        found["own_gap"] = _told(gap([*alone.values()], [*others.values()]))
    return found


def _compared(scores: Scores, base: Scores, domains: Sequence[str]) -> dict[str, Any]:
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


def _members(trained: Mapping[str, Path]) -> dict[str, Path]:
    """The cell of each domain; the seed model's for an expert that was refused."""
    return {name: place if cell_of(place).accepted else place.with_name(SEED_MODEL) for name, place in trained.items()}


def mixture_of(trained: Mapping[str, Path]) -> dict[str, Array]:
    """By domain, bits per byte of each row, [rows]; the seed model stands in for experts that were refused."""
    found = gather(sheets(_members(trained)))
    return {domain: _bits(losses(scored)[0][METHOD], scored.test.shape[2]) for domain, scored in found.items()}


def _own(places: Mapping[str, Path]) -> dict[str, Array]:
    """The same, of the domain's own expert alone."""
    return {domain: _of_cell(place, domain) for domain, place in places.items()}


def _of_cell(place: Path, domain: str) -> Array:
    (path,) = place.glob(f"*.{domain}.test{ENDING}")
    log_probs = load_sheet(path).log_probs.astype(np.float64)
    return _bits(-log_probs.sum(axis=1), log_probs.shape[1])


def _bits(nats: Array, tokens: int) -> Array:
    return np.asarray(nats / (tokens * math.log(2)))


def _stacked(seeds: Sequence[Mapping[str, Array]]) -> Scores:
    return {domain: np.stack([found[domain] for found in seeds]) for domain in seeds[0]}


def _told(found: Gap) -> dict[str, Any]:
    return {**asdict(found), "verdict": found.verdict}

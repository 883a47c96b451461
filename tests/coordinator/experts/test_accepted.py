"""From a plan to what is kept of it, and back from JSON."""

from __future__ import annotations

import math

import numpy as np
import pytest
from coordinator.expert_cases import accepted_job, accepted_plan
from pydantic import ValidationError

from pier_coordinator.experts.difficulty import Curves, Difficulty, Gain
from pier_coordinator.experts.plan import Plan, accepted, planned
from pier_coordinator.experts.recipe import Mode
from pier_coordinator.experts.replan import as_job
from pier_coordinator.experts.scheduling import Limits
from pier_coordinator.experts.task import Domain, Site, Size, Task
from pier_coordinator.store.experts import AcceptedPlan
from pier_node.experts.config import ExpertsConfig
from pier_node.experts.job import SEED
from pier_node.trainer.data.sources import FAMILIES
from pier_node.trainer.model.cost import flops_per_token

SITES = [Site("a", 1e9, memory=1e9), Site("b", 2.3e9)]
DIGESTS = [f"{number:032x}" for number in range(6)]


def made(mode: Mode, lineage: str = "all-from-seed", **experts: object) -> tuple[ExpertsConfig, Task, Plan]:
    config = ExpertsConfig.model_validate(
        {
            "experts": {"heterogeneity": mode, "lineage": lineage, "batch_size": 4, **experts},
            "model": {"preset": "llama-tiny"},
            "domains": [{"name": name, "weight": 2.0} for name in FAMILIES[:6]],
        }
    )
    small, medium, large = (
        Size(name, 1e4 * (1 + index), flops_per_token(model), 1e6, 1e5)
        for index, (name, model) in enumerate(zip("SML", config.sized()))
    )
    domains = tuple(Domain(each.name, 1.0, 1e6, judged=1e4) for each in config.domains)
    step_tokens = 4 * config.model.context
    steps, setup = config.experts.steps, config.experts.setup_s
    task = Task(domains, (small, medium, large), steps, step_tokens, setup=setup, chain=lineage == "chain")
    ones, gains = np.ones(6), np.arange(6, dtype=np.float64)
    curves = Curves(ones, ones * 10 + gains, ones * 5, 0.3, 0.3, 1e4)
    gain = Gain(gains, np.tile(gains, (5, 1)))
    return config, task, planned(mode, task, Difficulty(curves, gains, gain, gain), SITES, Limits(1.0, 0.01))


@pytest.mark.parametrize("mode", ["auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"])
def test_each_domain_has_a_job_that_costs_what_was_planned(mode: Mode) -> None:
    config, task, plan = made(mode)
    kept = accepted(config, task, plan, SITES, DIGESTS)
    assert [each.job.domain.name for each in kept.jobs] == [domain.name for domain in config.domains]
    assert [each.job.domain_hash for each in kept.jobs] == DIGESTS
    assert sum(each.job.flops for each in kept.jobs) == pytest.approx(plan.flops, rel=1e-9)
    for each, size in zip(kept.jobs, plan.recipe.sizes):
        assert each.job.ffn_dim == config.sized()[size].ffn_dim
        assert (each.job.after, each.job.domain.weight) == (SEED, 1.0)
    for site in SITES:
        seconds = sum(each.seconds for each in kept.jobs if each.site == site.name)
        assert seconds == pytest.approx(plan.loads[SITES.index(site)])


def test_idle_sites_train_for_longer_only_if_asked_to() -> None:
    config, task, plan = made("MHo-IHo")
    lean = accepted(config, task, plan, SITES, DIGESTS)
    config, task, plan = made("MHo-IHo", fill_idle=True)
    full = accepted(config, task, plan, SITES, DIGESTS)
    more = [two.job.steps - one.job.steps for one, two in zip(lean.jobs, full.jobs)]
    assert more == plan.extra.tolist()
    assert sum(more) > 0


def test_a_chain_stays_in_order_and_at_one_site() -> None:
    config, task, plan = made("MHe-IHo", lineage="chain")
    kept = accepted(config, task, plan, SITES, DIGESTS)
    chains = kept.chains()
    assert sorted(number for chain in chains for number in chain) == list(range(6))
    assert [len(chain) for chain in chains] == [2, 2, 2]
    for first, second in chains:
        assert (kept.jobs[first].job.after, kept.jobs[second].job.after) == (SEED, first)
        assert kept.jobs[first].site == kept.jobs[second].site
    both = as_job([kept.jobs[number] for number in chains[0]])
    assert both.flops == pytest.approx(sum(kept.jobs[number].job.flops for number in chains[0]))
    assert both.setup == 2 * config.experts.setup_s > 0
    assert both.judging == pytest.approx(plan.jobs[0].judging) != 0


def test_json_keeps_all_of_it_and_its_name() -> None:
    config, task, plan = made("auto")
    kept = accepted(config, task, plan, SITES, DIGESTS)
    again = AcceptedPlan.model_validate_json(kept.model_dump_json())
    assert again == kept
    assert again.id == kept.id
    assert again.sites[1].memory == math.inf
    assert accepted_plan(accepted_job(0, "lab-0")).id != kept.id


@pytest.mark.parametrize("jobs", [(accepted_job(1, "lab-0"),), (accepted_job(0, "lab-0", after=0),), ()])
def test_a_plan_whose_numbers_do_not_fit_is_refused(jobs: tuple[object, ...]) -> None:
    with pytest.raises(ValidationError):
        accepted_plan(*jobs)  # type: ignore[arg-type]

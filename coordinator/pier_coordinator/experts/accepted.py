"""An accepted plan as it is stored: each job, its site, and what is needed to place the job elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from pier_coordinator.experts.jobs import Job, judging_flops
from pier_coordinator.experts.plan import Plan
from pier_coordinator.experts.task import Site, Size, Task
from pier_node.base.toml import Section
from pier_node.experts.card import Finite
from pier_node.experts.card import Size as CardSize
from pier_node.experts.config import MOST_DOMAINS, ExpertsConfig, Name
from pier_node.experts.job import SEED, ExpertJob

Long = Annotated[float, Field(gt=0)]
"""A positive number; inf: no limit."""


class Kept(Section):
    """A section that survives a round trip through JSON, including inf."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class AcceptedJob(Kept):
    """A job and its site.

    Attributes:
        site: name of the site that starts it; the coordinator may move it to another site later.
        seconds: predicted duration at that site.
        memory, parameters, judging, moved, setup: as in Size and Job.
        sites: names of the sites that may see the text; empty: all sites.
    """

    job: ExpertJob
    site: Name
    seconds: Finite
    memory: Finite
    parameters: Finite
    judging: Finite = 0.0
    moved: Finite
    setup: Finite = 0.0
    sites: tuple[str, ...] = ()


class AcceptedSite(Kept):
    """A site as the plan assumes it: speed in FLOP/s, memory in bytes, line in bytes/s; inf: no limit."""

    name: Name
    speed: Long
    memory: Long
    line: Long


class AcceptedPlan(Kept):
    """An accepted plan; `seconds` is the predicted time until the last site is done."""

    mode: str
    seconds: Finite
    lost_after_s: Annotated[float, Field(ge=1, le=1e7)]
    jobs: Annotated[tuple[AcceptedJob, ...], Field(min_length=1, max_length=MOST_DOMAINS)]
    sites: Annotated[tuple[AcceptedSite, ...], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def check_numbers(self) -> Self:
        """Check that jobs are numbered in their order and that each comes after its parent."""
        for index, each in enumerate(self.jobs):
            if each.job.number != index or each.job.after >= index:
                raise ValueError(f"job {each.job.number} is number {index}, or comes before its parent")
        return self

    @property
    def id(self) -> str:
        """The plan's id, 32 hex digits: a hash of its content."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()

    def chains(self) -> list[list[int]]:
        """The chains: numbers of jobs that one site trains one after the other. Most chains have one job."""
        found: list[list[int]] = []
        for each in self.jobs:
            if each.job.after == SEED:
                found.append([each.job.number])
            else:
                next(chain for chain in found if chain[-1] == each.job.after).append(each.job.number)
        return found

    def chain(self, number: int) -> list[int]:
        """The chain that contains a job."""
        return next(chain for chain in self.chains() if number in chain)

    def queue(self) -> list[list[int]]:
        """The chains in the order in which sites train them: the shortest first."""
        return sorted(self.chains(), key=lambda chain: sum(self.jobs[each].job.flops for each in chain))

    def as_job(self, chain: Sequence[int]) -> Job:
        """A chain as one job for the planner."""
        own = [self.jobs[number] for number in chain]
        largest = max(own, key=lambda each: each.memory)
        size = Size(largest.job.size, largest.parameters, 0.0, largest.memory, 0.0)
        costs = ((each.job.flops, each.judging, each.moved, each.setup) for each in own)
        flops, judging, moved, setup = (sum(them) for them in zip(*costs))
        name, sites = own[-1].job.domain.name, frozenset(own[0].sites)
        return Job(name, tuple(chain), size, flops, judging, moved, setup, sites)


def accepted(
    config: ExpertsConfig, task: Task, plan: Plan, sites: Sequence[Site], digests: Sequence[str]
) -> AcceptedPlan:
    """Convert a plan into its stored form; jobs are numbered in the plan's order, chain by chain.

    Args:
        digests: hashes of the domains' texts, in the order of the domains.
    """
    steps = plan.recipe.steps + (plan.extra if config.experts.fill_idle else 0)
    jobs: list[AcceptedJob] = []
    names: tuple[CardSize, ...] = get_args(CardSize)
    for index, expert in enumerate(plan.jobs):
        site, after = sites[plan.schedule.places[index]], SEED
        for domain in expert.domains:
            kind = int(plan.recipe.sizes[domain])
            size = task.sizes[kind]
            flops = size.flops * int(steps[domain]) * task.step_tokens
            job = ExpertJob(
                number=len(jobs),
                domain=config.domains[domain].model_copy(update={"weight": 1.0, "sites": ()}),
                domain_hash=digests[domain],
                size=names[kind],
                ffn_dim=config.sized()[kind].ffn_dim,
                steps=int(steps[domain]),
                seed=config.experts.seed,
                batch_size=config.experts.batch_size,
                lr=config.experts.lr,
                min_lr=config.experts.min_lr,
                warmup_steps=config.experts.warmup_steps,
                max_epochs=config.experts.max_epochs,
                after=after,
                flops=flops,
            )
            moved = expert.moved / len(expert.domains)
            judging = judging_flops(size, [task.domains[domain]])
            seconds = (flops + judging) / site.speed + task.setup + moved / site.line
            own = {"memory": size.memory, "parameters": size.parameters, "moved": moved}
            own |= {"judging": judging, "setup": task.setup}
            jobs.append(AcceptedJob(job=job, site=site.name, seconds=seconds, sites=tuple(sorted(expert.sites)), **own))
            after = job.number
    return AcceptedPlan(
        mode=plan.mode,
        seconds=plan.schedule.makespan,
        lost_after_s=config.experts.lost_after_s,
        jobs=tuple(jobs),
        sites=tuple(AcceptedSite(name=it.name, speed=it.speed, memory=it.memory, line=it.line) for it in sites),
    )

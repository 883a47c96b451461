"""A plan for experts as scripts read it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pier_coordinator.commands.experts_view import Planning
from pier_coordinator.experts.plan import Plan


def told(planning: Planning) -> dict[str, Any]:
    """The domains, and the plan of each mode or why it has none; times in seconds, sizes in bytes."""
    difficulty = planning.difficulty
    domains = [
        {
            "name": domain.name,
            "digest": digest,
            "tokens": domain.tokens,
            "bits_per_byte": float(difficulty.loss[index]),
            "size_gain": _gain(difficulty.size.value[index], difficulty.size.interval[:, index]),
            "step_gain": _gain(difficulty.step.value[index], difficulty.step.interval[:, index]),
        }
        for index, (domain, digest) in enumerate(zip(planning.task.domains, planning.digests))
    ]
    plans = {
        mode: _plan(planning, plan) if isinstance(plan, Plan) else {"error": str(plan)}
        for mode, plan in planning.plans.items()
    }
    return {"chosen": planning.chosen.mode, "domains": domains, "plans": plans}


def _gain(value: float, interval: Any) -> dict[str, float]:
    """Bits per byte and FLOP, with its interval."""
    return {"value": float(value), "low": float(interval[0]), "high": float(interval[1])}


def _plan(planning: Planning, plan: Plan) -> dict[str, Any]:
    return {
        "abstained": plan.recipe.abstained,
        "scale": plan.recipe.scale,
        "flops": plan.flops,
        "budget": plan.budget,
        "seconds": plan.schedule.makespan,
        "bound": plan.schedule.bound,
        "bound_is": plan.schedule.why,
        "gap": plan.schedule.gap,
        "idle": plan.idle,
        "loss": plan.loss,
        "sites": [_site(planning, plan, index) for index in range(len(planning.sites))],
    }


def _site(planning: Planning, plan: Plan, index: int) -> dict[str, Any]:
    site, own = planning.sites[index], plan.held(index)
    ends = [*accumulate(job.seconds(site) for job in own)]
    return {
        "name": site.name,
        "seconds": float(plan.loads[index]),
        "memory": plan.memory(index),
        "experts": [
            {
                "begins": begins,
                "ends": end,
                "size": job.size.name,
                "flops": job.flops,
                "domains": [_domain(planning, plan, domain) for domain in job.domains],
            }
            for job, begins, end in zip(own, [0.0, *ends], ends)
        ],
    }


def _domain(planning: Planning, plan: Plan, domain: int) -> dict[str, Any]:
    return {
        "name": planning.task.domains[domain].name,
        "steps": int(plan.recipe.steps[domain]),
        "extra_steps": int(plan.extra[domain]),
        "epochs": float(plan.epochs[domain]),
    }

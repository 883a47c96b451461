"""A small accepted plan, and what sites say of its experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from coordinator.cases import NOW

from pier_coordinator.store.experts import AcceptedPlan, AcceptedSite, Expert
from pier_coordinator.store.facts import Fact
from pier_node.experts.config import DomainSection
from pier_node.experts.job import SEED, ExpertJob
from pier_node.experts.sheet import Sheet, Subject, row_hashes
from pier_node.trainer.data.sources import Split

WEIGHTS = "cd" * 32
DONE = {
    "name": "ab" * 16,
    "weights": WEIGHTS,
    "loss": 2.0,
    "parent_loss": 2.5,
    "standard_error": 0.1,
    "accepted": True,
    "done": True,
}


def accepted_job(number: int, site: str, flops: float = 1e9, after: int = SEED, sites: tuple[str, ...] = ()) -> Expert:
    name = ("topics", "network", "formats", "numbers", "tools")[number]
    job = ExpertJob(
        number=number,
        domain=DomainSection(name=name),
        domain_hash="0" * 32,
        size="S",
        ffn_dim=352,
        steps=100,
        seed=1,
        batch_size=8,
        lr=1e-3,
        min_lr=1e-4,
        warmup_steps=5,
        after=after,
        flops=flops,
    )
    return Expert(job=job, site=site, seconds=10.0, memory=1e6, parameters=1e6, moved=0.0, sites=sites)


def accepted_plan(*jobs: Expert, sites: tuple[str, ...] = ("lab-0", "lab-1"), **more: Any) -> AcceptedPlan:
    inf = float("inf")
    there = tuple(AcceptedSite(name=name, speed=1e8, memory=inf, line=inf) for name in sites)
    return AcceptedPlan(**{"mode": "auto", "seconds": 20.0, "lost_after_s": 60.0, "jobs": jobs, "sites": there, **more})


def sheet(expert: str, domain: str, split: Split = "test", weights: str = WEIGHTS, rows: int = 3) -> Sheet:
    """What somebody gave a text of nothing."""
    texts = np.zeros((rows, 9), dtype=np.uint8)
    log_probs = np.full((rows, 8), -0.5, dtype=np.float32)
    return Sheet(Subject(expert=expert, weights=weights, domain=domain, split=split), log_probs, row_hashes(texts))


def said(plan: AcceptedPlan, node: str, job: int, **body: Any) -> Fact:
    return Fact(NOW, "expert", node, {"plan": plan.id, "job": job, "done": False, "problem": "", **body})

"""Protobuf messages about experts: the jobs that the coordinator assigns and the progress that a site reports."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from pier_node.base.errors import PierError
from pier_node.base.toml import first_problem
from pier_node.base.units import printable
from pier_node.experts.card import Card
from pier_node.experts.config import MOST_DOMAINS
from pier_node.experts.job import ExpertJob
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoringOrder
from pier_node.site.coordinator.records import known
from pier_node.site.loop import Experts
from pier_proto.v1.coordinator_pb2 import Expert, ExpertCheckpoint, ExpertRecord, Record, Scoring

DOMAIN = ("source", "path", "text_field")
"""Fields of a domain in a job's message."""


def experts(message: Expert) -> Experts:
    """Parse the assignment. Raises PierError when it contains something that is not allowed."""
    if max(len(message.jobs), len(message.checkpoints)) > MOST_DOMAINS:
        raise PierError(f"{len(message.jobs)} jobs: at most {MOST_DOMAINS} are taken")
    try:
        scoring = _scoring(message.scoring) if message.HasField("scoring") else None
        checkpoints = tuple(map(kept, message.checkpoints))
        return Experts(message.plan, tuple(map(_job, message.jobs)), message.complete, scoring, checkpoints)
    except ValidationError as error:
        raise PierError(f"an order for experts: {first_problem(error)}") from error


def job_fields(job: ExpertJob) -> dict[str, Any]:
    """A job as the JSON form of its message."""
    told = job.model_dump(exclude={"domain", "after"})
    place = {key: getattr(job.domain, key) for key in DOMAIN}
    return {**told, **place, "domain": job.domain.name, "after": job.after + 1}


def kept(message: ExpertCheckpoint) -> Kept:
    """The checkpoint that a message describes. Raises ValidationError."""
    return Kept(job=message.job, step=message.step, size=message.size, digest=message.digest)


def scoring_fields(order: ScoringOrder) -> dict[str, Any]:
    """A scoring order as the JSON form of its message."""
    domains = [
        {"name": each.section.name, **{key: getattr(each.section, key) for key in DOMAIN}, "domain_hash": each.digest}
        for each in order.domains
    ]
    return {"id": order.id, "experts": [*order.experts], "domains": domains, "rows": order.rows}


def progress_record(plan: str, job: ExpertJob, step: int, loss: float, tokens: int, seconds: float) -> Record:
    """A record of an expert's training progress."""
    told = ExpertRecord(
        plan=plan, job=job.number, step=step, training_loss=known(loss), tokens=tokens, seconds=min(seconds, 1e12)
    )
    return Record(time=time.time(), expert=told)


def card_record(plan: str, job: ExpertJob, card: Card, seconds: float) -> Record:
    """A record that an expert is finished."""
    told = ExpertRecord(
        plan=plan,
        job=job.number,
        name=card.name,
        step=card.steps,
        training_loss=float("nan"),
        tokens=card.tokens,
        flops=card.flops,
        seconds=seconds,
        done=True,
        loss=card.loss,
        parent_loss=card.parent_loss,
        standard_error=card.standard_error,
        epochs=card.epochs,
        accepted=card.accepted,
        weights=card.digest,
    )
    return Record(time=time.time(), expert=told)


def problem_record(plan: str, job: ExpertJob, problem: str) -> Record:
    """A record that this site cannot train an expert."""
    told = ExpertRecord(plan=plan, job=job.number, training_loss=float("nan"), problem=printable(problem[:2000]))
    return Record(time=time.time(), expert=told)


def _scoring(message: Scoring) -> ScoringOrder:
    domains = [
        {
            "section": {"name": each.name, **{key: getattr(each, key) for key in DOMAIN}},
            "digest": each.domain_hash,
        }
        for each in message.domains
    ]
    told = {"id": message.id, "experts": [*message.experts], "domains": domains, "rows": message.rows}
    return ScoringOrder.model_validate(told)


def _job(message: Message) -> ExpertJob:
    told = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    domain = {"name": told.pop("domain"), **{key: told.pop(key) for key in DOMAIN}}
    return ExpertJob.model_validate({**told, "domain": domain, "after": told["after"] - 1})

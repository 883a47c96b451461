"""The accepted plan of experts: what each expert is, what it costs, which site trains it and how far it is.

`Expert` is one expert's job from the plan to the page. What was accepted never changes; the plan's JSON and its id are
of that alone. What changes is in the table of jobs, except for what a site reports while it trains: it reports again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from pier_coordinator.store.facts import event, number, text
from pier_coordinator.store.writer import Transaction
from pier_node.base.toml import Section
from pier_node.experts.card import Finite
from pier_node.experts.config import MOST_DOMAINS, Name
from pier_node.experts.job import SEED, ExpertJob

RESULT = ("name", "loss", "parent_loss", "standard_error", "accepted", "epochs", "flops", "tokens", "seconds")

Long = Annotated[float, Field(gt=0)]
"""A positive number; inf: no limit."""


class Kept(Section):
    """A section that survives a round trip through JSON, including inf."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")


class Expert(Kept):
    """An expert of a plan. The last five attributes are its state, and no part of the plan's JSON.

    Attributes:
        job: what its site is told to train.
        site: name of the site that starts it; the coordinator may move it to another site later.
        seconds: predicted duration at that site.
        memory, parameters, judging, moved, setup: as in Size and Job of the planner.
        sites: names of the sites that may see the text; empty: all sites.
        node: node id of the site that trains it or has trained it; "": no site can.
        result: what that site reported when the expert was done.
        declined: node ids of the sites that cannot train it.
        step: steps that its site has reported; None: none since it got the expert or the coordinator started.
        training_loss: loss of that step, nats per byte.
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
    node: str = Field(default="", exclude=True)
    result: dict[str, Any] | None = Field(default=None, exclude=True)
    declined: tuple[str, ...] = Field(default=(), exclude=True)
    step: int | None = Field(default=None, exclude=True)
    training_loss: float | None = Field(default=None, exclude=True)

    @property
    def number(self) -> int:
        """Its position in the plan."""
        return self.job.number

    @property
    def state(self) -> str:
        """Its state in a word."""
        if self.result:
            return "accepted" if self.result["accepted"] else "refused"
        if not self.node:
            return "nobody"
        return "waiting" if self.step is None else "training"

    def steps_done(self, kept: int) -> int:
        """Number of steps done; `kept` is the step of its newest checkpoint at the coordinator, 0 if there is none."""
        return self.job.steps if self.result else kept if self.step is None else min(self.step, self.job.steps)

    def progressed(self, step: int, loss: float | None) -> Self:
        """Return a copy with what its site has reported in training."""
        return self.model_copy(update={"step": step, "training_loss": loss})

    def done(self, body: Mapping[str, Any]) -> Self:
        """Return a copy with the result that its site reported."""
        result: dict[str, Any] = {key: number(body, key) for key in RESULT}
        result |= {"name": text(body, "name"), "accepted": body.get("accepted") is True}
        return self._stopped(result={**result, "weights": text(body, "weights")})

    def declined_by(self, node: str) -> Self:
        """Return a copy that records that a site cannot train it."""
        return self._stopped(declined=tuple(dict.fromkeys((*self.declined, node))))

    def moved_to(self, node: str) -> Self:
        """Return a copy that another site trains, from the start or from its checkpoint; "": no site can."""
        return self._stopped(node=node)

    def accepted_at(self, node: str) -> Self:
        """Return a copy as it is when its plan is accepted."""
        return self._stopped(node=node, declined=())

    def is_as(self, other: Expert) -> bool:
        """Whether it is where the other is, and neither done nor declined since."""
        return (self.node, self.result, self.declined) == (other.node, other.result, other.declined)

    def _stopped(self, **changes: Any) -> Self:
        return self.model_copy(update={"result": None, "step": None, "training_loss": None, **changes})


class AcceptedSite(Kept):
    """A site as the plan assumes it: speed in FLOP/s, memory in bytes, line in bytes/s; inf: no limit.

    Attributes:
        name: its name when the plan was made; it may call itself otherwise since.
        node: its node id, known once the plan is accepted; no part of the plan's JSON.
    """

    name: Name
    speed: Long
    memory: Long
    line: Long
    node: str = Field(default="", exclude=True)


class AcceptedPlan(Kept):
    """An accepted plan; `seconds` is the predicted time until the last site is done."""

    mode: str
    seconds: Finite
    lost_after_s: Annotated[float, Field(ge=1, le=1e7)]
    jobs: Annotated[tuple[Expert, ...], Field(min_length=1, max_length=MOST_DOMAINS)]
    sites: Annotated[tuple[AcceptedSite, ...], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def check_numbers(self) -> Self:
        """Check that jobs are numbered in their order and that each comes after its parent."""
        for index, each in enumerate(self.jobs):
            if each.number != index or each.job.after >= index:
                raise ValueError(f"job {each.number} is number {index}, or comes before its parent")
        return self

    @cached_property
    def id(self) -> str:
        """The plan's id, 32 hex digits: a hash of what was accepted."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()

    @property
    def complete(self) -> bool:
        """Whether all experts are done."""
        return all(job.result for job in self.jobs)

    def updated(self, jobs: Iterable[Expert]) -> Self:
        """Return a copy with the current state of these experts."""
        known = {job.number: job for job in jobs}
        return self.model_copy(update={"jobs": tuple(known.get(job.number, job) for job in self.jobs)})

    def of_sites(self, nodes: Mapping[str, str]) -> Self:
        """Return a copy that knows its sites; `nodes`: node ids by name."""
        sites = (site.model_copy(update={"node": nodes.get(site.name, "")}) for site in self.sites)
        return self.model_copy(update={"sites": tuple(sites)})

    def chains(self) -> list[list[int]]:
        """The chains: numbers of jobs that one site trains one after the other. Most chains have one job."""
        found: list[list[int]] = []
        for each in self.jobs:
            if each.job.after == SEED:
                found.append([each.number])
            else:
                next(chain for chain in found if chain[-1] == each.job.after).append(each.number)
        return found

    def chain(self, number: int) -> list[int]:
        """The chain that contains a job."""
        return next(chain for chain in self.chains() if number in chain)

    def queue(self) -> list[list[int]]:
        """The chains in the order in which sites train them: the shortest first."""
        return sorted(self.chains(), key=lambda chain: sum(self.jobs[each].job.flops for each in chain))


def newest(connection: sqlite3.Connection) -> tuple[float, AcceptedPlan] | None:
    """The newest plan with the state of its jobs, and when it was accepted, in seconds since the epoch."""
    row = connection.execute("SELECT * FROM expert_plans ORDER BY rowid DESC").fetchone()
    if row is None:
        return None
    plan = AcceptedPlan.model_validate_json(row["plan"]).of_sites(json.loads(row["nodes"]))
    jobs = connection.execute("SELECT * FROM expert_jobs WHERE plan = ?", (row["id"],))
    return row["accepted_at"], plan.updated(_stored(plan.jobs[job["number"]], job) for job in jobs)


def _stored(job: Expert, row: sqlite3.Row) -> Expert:
    result = json.loads(row["result"]) if row["result"] else None
    return job.model_copy(
        update={"node": row["node"], "result": result, "declined": tuple(json.loads(row["declined"]))}
    )


def accept_experts(transaction: Transaction, plan: AcceptedPlan, now: float) -> None:
    """Make this the current plan. Accepting the same plan again restarts it."""
    values = plan.id, now, plan.model_dump_json(), json.dumps({site.name: site.node for site in plan.sites})
    transaction.execute(
        "INSERT OR REPLACE INTO expert_plans (id, accepted_at, plan, nodes) VALUES (?, ?, ?, ?)", *values
    )
    transaction.execute("DELETE FROM expert_jobs WHERE plan = ?", plan.id)
    put_experts(transaction, plan.id, plan.jobs)
    transaction.add([event(now, f"the plan {plan.id[:8]} of experts was accepted")])


def put_experts(transaction: Transaction, plan: str, jobs: Iterable[Expert]) -> None:
    """Store the current state of these jobs."""
    for job in jobs:
        values = (job.number, job.node, json.dumps(job.result) if job.result else None, json.dumps(job.declined))
        transaction.execute("INSERT OR REPLACE INTO expert_jobs VALUES (?, ?, ?, ?, ?)", plan, *values)

from __future__ import annotations

import math
from typing import Any

import pytest
from coordinator.expert_cases import accepted_job
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.service.bounds import RULES
from pier_node.base.errors import PierError
from pier_node.experts import job as jobs
from pier_node.experts.config import DomainSection
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoredDomain, ScoringOrder
from pier_node.site.coordinator.expert_messages import (
    experts,
    job_fields,
    problem_record,
    progress_record,
    scoring_fields,
)
from pier_proto.v1.coordinator_pb2 import Expert, ExpertCheckpoint, ExpertJob, Scoring
from pier_proto.v1.coordinator_pb2 import ScoredDomain as ScoredDomainMessage

PLAN = "ab" * 16
DOMAINS = st.one_of(
    st.builds(DomainSection, name=st.sampled_from(["topics", "tools"])),
    st.builds(
        DomainSection,
        name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        source=st.sampled_from(["text", "jsonl", "parquet"]),
        path=st.text(min_size=1, max_size=40),
        text_field=st.text(max_size=20),
    ),
)
JOBS = st.builds(
    jobs.ExpertJob,
    number=st.integers(0, 255),
    domain=DOMAINS,
    domain_hash=st.just("0" * 32),
    size=st.sampled_from(["S", "M", "L"]),
    ffn_dim=st.integers(1, 1 << 20),
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    batch_size=st.integers(1, 1 << 16),
    lr=st.floats(0.5, 1),
    min_lr=st.floats(0, 0.5),
    warmup_steps=st.integers(0, 1000),
    max_epochs=st.floats(1, 100),
    after=st.integers(-1, 255),
    flops=st.floats(0, 1e30),
)


@given(st.lists(JOBS, max_size=4), st.booleans())
def test_what_is_sent_arrives(sent: list[jobs.ExpertJob], complete: bool) -> None:
    fields = {"plan": PLAN, "jobs": [job_fields(job) for job in sent], "complete": complete}
    found = experts(Expert.FromString(ParseDict(fields, Expert()).SerializeToString()))
    assert (found.plan, found.jobs, found.complete) == (PLAN, tuple(sent), complete)


SCORINGS = st.builds(
    ScoringOrder,
    id=st.just("ab" * 16),
    experts=st.lists(st.just("cd" * 16), max_size=3).map(tuple),
    domains=st.lists(
        st.builds(ScoredDomain, section=DOMAINS, digest=st.sampled_from(["", "0" * 32])), min_size=1, max_size=3
    ).map(tuple),
    rows=st.integers(0, 2**31 - 1),
)


@given(SCORINGS)
def test_an_order_to_score_arrives(sent: ScoringOrder) -> None:
    fields = {"plan": PLAN, "complete": True, "scoring": scoring_fields(sent)}
    assert experts(Expert.FromString(ParseDict(fields, Expert()).SerializeToString())).scoring == sent


@given(st.integers(0, 255), st.integers(1, 10**9), st.integers(1, 1 << 50))
def test_checkpoints_arrive(job: int, step: int, size: int) -> None:
    sent = Kept(job=job, step=step, size=size, digest="0f" * 32)
    fields = {"plan": PLAN, "checkpoints": [sent.model_dump()]}
    assert experts(Expert.FromString(ParseDict(fields, Expert()).SerializeToString())).checkpoints == (sent,)


@pytest.mark.parametrize(("key", "value"), [("step", 0), ("size", 0), ("size", 1 << 51), ("digest", "../x")])
def test_a_checkpoint_that_is_not_allowed_is_refused(key: str, value: object) -> None:
    fields: dict[str, Any] = {"job": 0, "step": 1, "size": 1, "digest": "0f" * 32, key: value}
    with pytest.raises(PierError, match=key):
        experts(Expert(plan=PLAN, checkpoints=[ExpertCheckpoint(**fields)]))


def test_an_order_to_score_what_is_not_allowed_is_refused() -> None:
    message = Scoring(
        id="ab" * 16, experts=["../secret"], domains=[ScoredDomainMessage(name="topics", source="builtin")]
    )
    with pytest.raises(PierError, match=r"experts\.0"):
        experts(Expert(plan=PLAN, scoring=message))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("size", "XL", "size"), ("steps", 0, "steps"), ("lr", math.inf, "lr"), ("domain", "../x", r"domain\.name")],
)
def test_a_job_that_is_not_allowed_is_refused_and_named(key: str, value: object, named: str) -> None:
    message = ParseDict(job_fields(accepted_job(0, "lab-0").job), ExpertJob())
    setattr(message, key, value)
    with pytest.raises(PierError, match=named):
        experts(Expert(plan=PLAN, jobs=[message]))


def test_too_many_jobs_are_refused() -> None:
    for many in (
        Expert(plan=PLAN, jobs=[ExpertJob()] * 257),
        Expert(plan=PLAN, checkpoints=[ExpertCheckpoint()] * 257),
    ):
        with pytest.raises(PierError, match="at most 256"):
            experts(many)


def test_records_are_within_the_bounds_of_the_wire() -> None:
    job = accepted_job(3, "lab-0").job
    said = "x" * 5000, "the log ends with:\n\x1b[31m 40%\r 80%"
    steps = (progress_record(PLAN, job, 40, loss, 400, 1.5) for loss in (math.nan, math.inf))
    for record in (*steps, *(problem_record(PLAN, job, it) for it in said)):
        RULES.check(record)
        assert record.expert.job == 3

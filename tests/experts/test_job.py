from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from pier_node.config.run import RunConfig
from pier_node.experts.card import artefact_name
from pier_node.experts.job import ExpertJob
from pier_node.outer.schedule import learning_rate

MakeJob = Callable[..., ExpertJob]


def test_an_expert_warms_up_and_anneals_to_its_own_length(make_job: MakeJob) -> None:
    inner = make_job(steps=40, warmup_steps=5, lr=3e-3, min_lr=3e-4).run(RunConfig()).inner
    rates = [learning_rate(step, inner) for step in range(41)]
    assert rates[:5] == pytest.approx([3e-3 * step / 5 for step in range(1, 6)])
    assert max(rates) == 3e-3
    assert rates[40] == pytest.approx(3e-4)
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_what_the_job_does_not_say_is_as_in_the_run(make_job: MakeJob) -> None:
    given = RunConfig.model_validate({"inner": {"weight_decay": 0.3, "total_steps": 9}, "run": {"seed": 5, "sites": 3}})
    run = make_job(ffn_dim=99).run(given)
    assert (run.inner.weight_decay, run.inner.total_steps, run.model.ffn_dim) == (0.3, 40, 99)
    assert run.model.model_copy(update={"ffn_dim": given.model.ffn_dim}) == given.model
    assert (run.run.seed, run.run.sites, run.data.validation) == (7, 1, 0.1)


def test_a_warm_up_never_takes_more_than_half(make_job: MakeJob) -> None:
    assert make_job(steps=6, warmup_steps=20).run(RunConfig()).inner.warmup_steps == 3


def test_its_name_follows_from_what_decides_its_weights(make_job: MakeJob) -> None:
    job = make_job()
    run, recipe = RunConfig(), job.recipe(RunConfig())
    assert job.name("ab" * 32, run) == artefact_name("ab" * 32, job.domain_hash, "S", 40, 7, recipe)
    other = RunConfig.model_validate({"inner": {"weight_decay": 0.3}})
    jobs = [(job, run), (job, other), *((make_job(**it), run) for it in ({"lr": 2e-3}, {"batch_size": 5}, {"seed": 8}))]
    names = {each.name(parent, of) for each, of in jobs for parent in ("ab" * 32, "cd" * 32)}
    assert len(names) == 10
    assert make_job(number=3, flops=2.0).name("ab" * 32, run) == job.name("ab" * 32, run)


@pytest.mark.parametrize(
    "changed",
    [{"steps": 0}, {"lr": float("nan")}, {"lr": 0.0}, {"seed": -1}, {"after": 256}, {"min_lr": 1.0}, {"more": 1}],
)
def test_what_is_not_allowed_is_refused(make_job: MakeJob, changed: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        make_job(**changed)

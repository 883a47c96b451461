"""Experts trained by real sites: one is killed and goes on, another is lost and its jobs go elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes.coordinated import Coordinated, coordinated
from processes.place import HERE
from processes.program import ENVIRONMENT
from processes.site import Site, wait_until

from pier_coordinator.commands.client import Client
from pier_coordinator.identity.home import PLAN_FILE
from pier_coordinator.store.experts import AcceptedPlan, AcceptedSite, Expert
from pier_node.config.run import load
from pier_node.experts.card import load_card, load_ensemble
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out
from pier_node.experts.job import ExpertJob

pytestmark = pytest.mark.processes

INNER, OUTER = {"total_steps": 600}, {"algorithm": "diloco", "inner_steps": 40}
"""Long enough for a plan to be accepted before it ends."""
LAST = 15
LOST = 15.0
"""Seconds for which a site may be silent once its lease has expired: it may take as long to start again."""
SOME, LONG = 800, 4000
"""Steps that take longer than until the first checkpoint; and far longer than it takes to look."""


def domain(folder: Path, name: str) -> DomainSection:
    place = folder / "texts" / name
    place.mkdir(parents=True)
    for number in range(150):
        (place / f"{number}.txt").write_text(" ".join(f"{name} {number * word % 97}" for word in range(150)))
    return DomainSection(name=name, source="text", path=str(place))


def job(run: Coordinated, folder: Path, number: int, name: str, steps: int, lr: float = 2e-3) -> ExpertJob:
    section, model = domain(folder, name), load(run.folder / "run.toml").model
    return ExpertJob(
        number=number,
        domain=section,
        domain_hash=read_held_out(section).digest,
        size="M",
        ffn_dim=model.ffn_dim * 2,
        steps=steps,
        seed=1,
        batch_size=2,
        lr=lr,
        min_lr=lr / 10,
        warmup_steps=5,
        max_epochs=1000.0,
        flops=steps * 1e6,
    )


def accept(run: Coordinated, *jobs: tuple[ExpertJob, str]) -> None:
    inf = float("inf")
    placed = [Expert(job=each, site=site, seconds=1.0, memory=1.0, parameters=1.0, moved=1e9) for each, site in jobs]
    # Lines so slow that no expert moves because one site is faster than another on a busy machine.
    sites = [AcceptedSite(name=site.name, speed=1e9, memory=inf, line=1e3) for site in run.sites]
    plan = AcceptedPlan(mode="auto", seconds=1.0, lost_after_s=LOST, jobs=tuple(placed), sites=tuple(sites))
    for site in run.sites:
        site.take_part()
    (run.folder / PLAN_FILE).write_text(plan.model_dump_json())
    Client.of(run.folder).act("experts", plan=plan.id)


def steps(run: Coordinated) -> dict[str, int]:
    """Done, by domain."""
    return {row["domain"]: row["done"] for row in Client.of(run.folder).act("experts-told")["experts"]}


def working(site: Site) -> bool:
    """Whether it has written a checkpoint of an expert."""
    return any(site.folder.glob("experts/*.work/checkpoint.safetensors"))


@pytest.mark.smoke
def test_a_killed_site_goes_on_and_a_lost_one_s_experts_are_trained_by_another(tmp_path: Path) -> None:
    with coordinated(tmp_path, 2, inner=INNER, outer=OUTER) as run:
        alpha, beta = run.sites
        jobs = [(job(run, tmp_path, 0, "sea", SOME), "alpha"), (job(run, tmp_path, 1, "sky", LONG), "beta")]
        accept(run, *jobs)
        alpha.wait("a checkpoint of its expert", lambda: working(alpha))
        alpha.kill()
        alpha.start()
        beta.wait("a checkpoint of its expert", lambda: working(beta))
        assert len({site.digests()[LAST] for site in run.sites}) == 1  # all branch from the same bits
        wait_until("alpha has its expert", lambda: any(alpha.folder.glob("experts/*/expert.json")))
        assert "the expert of sea continues at step" in alpha.log.read_text()
        wait_until("the coordinator keeps a checkpoint of sky", lambda: kept(run, 1) > 0)
        beta.kill()
        wait_until("sky has gone to alpha", lambda: "training the expert of sky" in alpha.log.read_text())
        step = moved(run)
        resumed = f"the expert of sky resumed at step {step} from its checkpoint"
        wait_until("alpha says that it goes on", lambda: resumed in told(run))
        wait_until("sky goes on there", lambda: steps(run)["sky"] > step)
        assert "begins again" not in alpha.log.read_text()
        assert steps(run)["sea"] == SOME
        assert kept(run, 0) == 0, "it is done"


def moved(run: Coordinated) -> int:
    """The step of the checkpoint from which alpha trains the expert of sky, as beta is lost."""
    pattern = rf"alpha trains the expert of sky from its checkpoint at step (\d+): beta is silent for {LOST:.0f} s"
    (found,) = filter(None, (re.fullmatch(pattern, text) for text in told(run)))
    return int(found[1])


def kept(run: Coordinated, number: int) -> int:
    """The step of the checkpoint that the coordinator keeps of a job; 0: it has none."""
    found = (run.folder / "checkpoints").glob(f"*/{number}-*.safetensors")
    return max((int(path.name.split("-")[1]) for path in found), default=0)


def told(run: Coordinated) -> list[str]:
    return [body.get("text", "") for _, kind, _, body in run.facts() if kind in ("event", "note")]


def asked_for_scores(run: Coordinated, *words: str) -> subprocess.Popen[str]:
    """`pier-coordinator evaluate`, which waits for the sites."""
    command = HERE.command("pier-coordinator", "evaluate", "--data", str(run.folder), "--json", *words)
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    wait_until("the sites are asked", lambda: evaluation(run).get("finished") is False)
    return started


def evaluation(run: Coordinated) -> dict[str, Any]:
    return Client.of(run.folder).act("evaluation")


def test_done_experts_are_scored_where_they_are_and_collected_into_an_ensemble(tmp_path: Path) -> None:
    with coordinated(tmp_path, 2, inner=INNER, outer=OUTER) as run:
        accept(
            run,
            (job(run, tmp_path, 0, "sea", 30), "alpha"),
            (job(run, tmp_path, 1, "sky", 30), "beta"),
            (job(run, tmp_path, 2, "land", 10, lr=2.0), "beta"),  # a thousand times too much
        )
        evaluate = asked_for_scores(run, "--rows", "6", "--domain", "encodings")
        for site in run.sites:
            assert site.ended() == 0  # nobody needs them any more
        scores, said = evaluate.communicate(timeout=120)
        assert evaluate.returncode == 0, said
        words = [word for site in run.sites for word in ("--from", str(site.folder))]
        out = tmp_path / "ensemble"
        collect = HERE.command("pier-coordinator", "experts", "collect", str(out), "--data", str(run.folder), *words)
        done = subprocess.run(collect, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        status = HERE.command("pier-coordinator", "experts", "status", "--data", str(run.folder), "--json")
        told = json.loads(subprocess.run(status, capture_output=True, timeout=60, env=ENVIRONMENT).stdout)
    assert told["complete"]
    assert [row["accepted"] for row in told["experts"]] == [True, True, False]
    members = load_ensemble(out).members
    assert [(member.domain, member.stands_in) for member in members] == [("sea", False), ("sky", False), ("land", True)]
    card = load_card(out / members[0].folder)
    assert (card.domain, card.steps, card.accepted) == ("sea", 30, True)
    assert members[2].folder == card.parent[:32]  # the seed
    report = json.loads(scores)
    assert report["experts"] == ["sea", "sky", "land"]
    assert list(report["domains"]) == ["sea", "sky", "land", "encodings"]
    assert {found["rows"] for found in report["domains"].values()} <= {1, 2, 3, 4, 5, 6}
    own = [report["domains"][name]["experts"].index(min(report["domains"][name]["experts"])) for name in ("sea", "sky")]
    assert own == [0, 1]  # each is the best of its own text
    assert (report["missing"], report["left_out"]) == ({}, {})

"""What the operator can do, on a coordinator that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, CAROL, CONFIG, Running, Ticket, running
from coordinator.expert_cases import accepted_job, accepted_plan
from grpc.aio import AioRpcError

from pier_coordinator.commands.init import init
from pier_coordinator.identity.home import PLAN_FILE, Home
from pier_coordinator.runs.operator import Operator
from pier_coordinator.store.refusals import Refused
from pier_node.config.run import PipelineSection
from pier_proto.v1.peer_pb2 import Place

STAGED = CONFIG.model_copy(update={"pipeline": PipelineSection(stages=3)})


def operator(run: Running, folder: Path) -> Operator:
    init(folder, "llama-tiny")
    return Operator(run.coordinator, Home.found(folder), "10.0.0.9:7790")


async def test_of_an_invite_that_is_taken_back_it_is_told_who_came_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        unused = (await operates.invite("lab-b", 3600.0, 1))["id"]
        assert await operates.revoke(unused) == {"invite": unused, "sites": []}
        used = f"for-{ALICE.node}"
        assert await operates.revoke(used) == {"invite": used, "sites": ["lab-0"]}
        assert run.coordinator.sites[ALICE.node].revoked_at is None
        assert await operates.revoke("lab-0") == {"site": "lab-0", "invite": "", "sites": []}
        assert await operates.revoke(used) == {"invite": used, "sites": []}


async def test_a_revoked_site_does_not_come_back_with_the_invite_of_many(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates, ticket = operator(run, tmp_path / "my-run"), Ticket.make("for-all")
        await run.coordinator.invite(ticket.row(uses=5))
        async with run.caller(ticket.credentials) as caller:
            for number, site in enumerate((ALICE, BOB)):
                await caller.enrol(ticket.request(site, name=f"lab-{number}"))
            assert await operates.revoke("lab-0") == {"site": "lab-0", "invite": "for-all", "sites": ["lab-1"]}
            with pytest.raises(AioRpcError, match="this invite was revoked"):
                await caller.enrol(ticket.request(CAROL, name="lab-0 again"))
        assert "invite for-all was revoked with lab-0, which came in with it" in [
            fact.body.get("text") for fact in run.told
        ]
        assert await operates.revoke("lab-1") == {"site": "lab-1", "invite": "", "sites": []}


async def test_a_name_with_a_space_stays_one_word_in_the_command(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        command = (await operator(run, tmp_path / "my-run").invite("lab b", 3600.0, 1))["command"]
        assert command.endswith(" --name 'lab b'")


async def test_a_stage_is_for_a_site_that_holds_none(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates, run.coordinator.config = operator(run, tmp_path / "my-run"), STAGED
        await run.let_in(ALICE)
        await operates.assign("lab-0", "stage", 2)
        assert run.coordinator.orders[ALICE.node].assignment == {"stage": {"number": 2}}
        with pytest.raises(Refused, match="this run has 3 stages, numbered from 0: there is no stage 3"):
            await operates.assign("lab-0", "stage", 3)
        with pytest.raises(Refused, match="nobody"):
            await operates.assign("nobody", "stage", 1)
        async with run.site(ALICE) as site:
            lease = (await site.register(ALICE)).lease
            await site.beat(ALICE, lease, place=Place(stage=2))
        await operates.assign("lab-0", "stage", 2)
        with pytest.raises(Refused, match="lab-0 holds stage 2: to give it another, start it with a new data folder"):
            await operates.assign("lab-0", "stage", 1)
        await operates.assign("lab-0", "replica", None)


async def test_there_is_one_open_invite_to_a_name(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        for _ in range(2):
            await operates.invite("", 3600.0, 1)
        first = (await operates.invite("lab-b", 3600.0, 1))["id"]
        with pytest.raises(Refused, match=rf"give another --name, or .* \(pier-coordinator revoke {first}\)"):
            await operates.invite("lab-b", 3600.0, 1)
        await operates.revoke(first)
        await operates.invite("lab-b", 3600.0, 1)
        run.wall.now += 3601.0
        await operates.invite("lab-b", 3600.0, 1)


async def test_the_plan_in_the_folder_is_started_if_it_is_the_one_that_was_meant(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), sites=("lab-0",))
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        with pytest.raises(Refused, match=r"experts\.json in the folder of the run is no plan"):
            await operates.experts(plan.id)
        (tmp_path / "my-run" / PLAN_FILE).write_text(plan.model_dump_json(indent=1))
        with pytest.raises(Refused, match="is another plan"):
            await operates.experts("f" * 32)
        assert (await operates.experts_told())["plan"] is None
        await operates.experts(plan.id)
        told = await operates.experts_told()
    assert (told["plan"], [row["site"] for row in told["experts"]]) == (plan.id, ["lab-0"])

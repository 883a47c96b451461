"""Experts that are unplugged and plugged while an ensemble answers, over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest
from experts.serving.ensembles import NAMES, make_ensemble, make_expert, opened, options, served
from hypothesis import given
from hypothesis import strategies as st

from pier_node.commands.serve import shelf_of
from pier_node.experts.mixture import Kind, Mixture, rule
from pier_node.experts.serving.plugging import Plugs

ASK: dict[str, Any] = {"prompt": "import os\nimport sys", "max_tokens": 24, "seed": 7, "logprobs": 2, "echo": True}
EXACT: tuple[Kind, ...] = ("decay", "bayes", "uniform")


class Client:
    """Asks a server."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session, self.address = session, address

    async def turn(self, name: str, verb: str, **headers: str) -> tuple[int, Any]:
        url = f"{self.address}/v1/experts/{quote(name)}/{verb}"
        async with self.session.post(url, headers=headers) as answer:
            return answer.status, await answer.json()

    async def states(self) -> dict[str, str]:
        async with self.session.get(f"{self.address}/v1/experts") as answer:
            return {expert["id"]: expert["state"] for expert in (await answer.json())["data"]}

    async def ask(self, **more: Any) -> Any:
        async with self.session.post(f"{self.address}/v1/completions", json={**ASK, **more}) as answer:
            return (await answer.json())["choices"][0]


@asynccontextmanager
async def serving(folder: Path, **changed: Any) -> AsyncIterator[Client]:
    asking = opened(folder, **changed)
    plugs = Plugs(asking, shelf_of(options(folder, **changed)))
    async with served(asking, plugs) as address, aiohttp.ClientSession() as session:
        yield Client(session, address)


def without(folder: Path, names: Sequence[str]) -> Path:
    """The same folder, with an ensemble.json that lacks some experts."""
    members = json.loads((folder / "ensemble.json").read_text())["members"]
    (folder / "ensemble.json").write_text(json.dumps({"members": [it for it in members if it["domain"] not in names]}))
    return folder


@pytest.mark.parametrize("top_k", [0, 1])
@pytest.mark.parametrize("posterior", [*EXACT, "fixed-share"])
async def test_after_unplugging_answers_are_those_of_an_ensemble_that_never_had_the_expert(
    tmp_path: Path, posterior: Kind, top_k: int
) -> None:
    full, part = make_ensemble(tmp_path / "full"), without(make_ensemble(tmp_path / "part"), ["encodings"])
    how = {"posterior": posterior, "top_k": top_k}
    async with serving(full, **how) as client, serving(part, **how) as never:
        before = await client.ask()
        assert (await client.turn("encodings", "unplug"))[0] == 200
        assert await client.ask() == await never.ask()
        assert await client.states() == {"topics": "plugged", "encodings": "unplugged", "network": "plugged"}
        assert (await client.turn("encodings", "plug"))[0] == 200
        assert await client.ask() == before, "it is as if it had never been away"


@pytest.mark.parametrize("posterior", EXACT)
async def test_an_answer_that_is_being_made_goes_on_without_the_expert(folder: Path, posterior: Kind) -> None:
    async with serving(folder, posterior=posterior) as client:
        url, body = f"{client.address}/v1/completions", {**ASK, "max_tokens": 400, "stream": True}
        async with client.session.post(url, json=body) as stream:
            await stream.content.readline()
            assert (await client.turn("network", "unplug"))[0] == 200
            events = (await stream.text()).split("\n\n")
        parts = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        assert {*parts[-1]["choices"][0]["posterior"]} == {"topics", "encodings"}
        assert {*parts[-2]["choices"][0]["logprobs"]["posterior"][-1]} == {"topics", "encodings"}


@given(st.integers(2, 5), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_weights_without_an_expert_are_what_they_would_be_had_it_never_been_there(k: int, at: int, seed: int) -> None:
    random, gone = np.random.default_rng(seed), at % k
    prior, logs = random.dirichlet(np.ones(k)) * 0.9 + 0.1 / k, -random.exponential(4, (40, k))
    left = np.delete(np.arange(k), gone)
    for kind in EXACT:
        whole, never = Mixture(rule(kind), prior), Mixture(rule(kind), prior[left] / prior[left].sum())
        for number, log_probs in enumerate(logs):
            if number == 20:
                whole.drop(gone)
            whole.observe(log_probs if number < 20 else log_probs[left])
            never.observe(log_probs[left])
        assert np.exp(whole.log_weights) == pytest.approx(np.exp(never.log_weights), abs=1e-9)


def test_with_fixed_share_they_are_not() -> None:
    logs = np.array([[-1.0, -5.0, -2.0], [-9.0, -1.0, -2.0]])
    shared = rule("fixed-share", share=0.1)
    whole, never = Mixture(shared, np.full(3, 1 / 3)), Mixture(shared, np.full(2, 0.5))
    for log_probs in logs:
        whole.observe(log_probs)
        never.observe(log_probs[1:])
    whole.drop(0)
    assert abs(np.exp(whole.log_weights) - np.exp(never.log_weights)).max() > 1e-3


async def test_an_expert_that_comes_later_is_plugged_and_one_trained_again_takes_its_place(folder: Path) -> None:
    without(folder, ["network"])
    async with serving(folder) as client:
        assert (await client.turn("network", "plug"))[0] == 404
        make_ensemble(folder)
        assert (await client.turn("network", "plug"))[0] == 200
        assert {*(await client.ask())["posterior"]} == {*NAMES}
        make_expert(folder / "again", 7)
        text = (folder / "ensemble.json").read_text()
        (folder / "ensemble.json").write_text(text.replace('"e2"', '"again"'))
        before = await client.ask(model="network")
        assert (await client.turn("network", "plug"))[0] == 200
        assert (await client.ask(model="network"))["logprobs"] != before["logprobs"]
        assert await client.states() == dict.fromkeys(NAMES, "plugged")


async def test_a_lost_expert_is_plugged_again_once_its_files_are_there(folder: Path) -> None:
    weights = folder / "e1" / "model.safetensors"
    whole = weights.read_bytes()
    async with serving(folder) as client:
        weights.write_bytes(b"")
        assert {*(await client.ask())["posterior"]} == {"topics", "network"}
        assert (await client.states())["encodings"] == "lost"
        weights.write_bytes(whole)
        assert (await client.turn("encodings", "plug"))[0] == 200
        assert {*(await client.ask())["posterior"]} == {*NAMES}


async def test_who_asks_an_expert_that_is_unplugged_is_told_so(folder: Path) -> None:
    async with serving(folder) as client:
        await client.turn("network", "unplug")
        async with client.session.post(f"{client.address}/v1/completions", json={**ASK, "model": "network"}) as answer:
            told = (await answer.json())["error"]
    assert (answer.status, told["code"]) == (404, "model_not_found")
    assert told["message"].startswith("the expert of network does not answer now; there are: ")
    assert told["message"].endswith("topics, encodings")


async def test_only_what_changes_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(folder) as client:
        with caplog.at_level(logging.INFO):
            for verb in ("plug", "unplug", "unplug", "plug", "plug"):
                assert (await client.turn("network", verb))[0] == 200
    assert [line for line in caplog.messages if "plugged" in line] == [
        "the expert of network was unplugged",
        "the expert of network was plugged",
    ]


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = make_ensemble(tmp_path / "mine", ["topics", "network"])
    async with serving(folder) as client:
        status, told = await client.turn("cooking", "unplug")
        assert (status, "there are: topics, network" in told["error"]["message"]) == (404, True)
        assert (await client.turn("topics", "unplug", Origin="http://evil.example"))[0] == 403
        assert (await client.turn("topics", "unplug", **{"X-Forwarded-For": "203.0.113.9"}))[0] == 403
        assert (await client.turn("topics", "unplug"))[0] == 200
        status, told = await client.turn("network", "unplug")
        assert (status, told["error"]["code"]) == (409, "last_expert")
        (folder / "ensemble.json").write_text("{")
        status, told = await client.turn("topics", "plug")
        assert (status, told["error"]["code"]) == (409, "not_readable")
        members = [{"domain": name, "folder": "e0", "stands_in": True} for name in ("topics", "network")]
        (folder / "ensemble.json").write_text(json.dumps({"members": members}))
        status, told = await client.turn("topics+network", "plug")
        assert (status, told["error"]["code"]) == (409, "same_domain")


async def test_one_that_does_not_fit_into_the_memory_is_refused(folder: Path) -> None:
    sizes = [expert.size for expert in opened(folder).experts]
    without(folder, ["network"])
    async with serving(folder, memory=sum(sizes[:2]) / 1e9) as client:
        make_ensemble(folder)
        status, told = await client.turn("network", "plug")
        assert (status, told["error"]["code"]) == (409, "no_room")
        assert (await client.turn("topics", "unplug"))[0] == 200


async def test_a_single_model_has_no_experts_to_plug(folder: Path) -> None:
    async with served(opened(folder)) as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/v1/experts") as answer:
            assert answer.status == 404
        async with session.post(f"{address}/v1/experts/topics/unplug") as answer:
            assert answer.status == 404

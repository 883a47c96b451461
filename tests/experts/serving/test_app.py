"""The completions protocol over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from experts.serving.ensembles import opened, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier_node.experts.serving import app
from pier_node.experts.serving.app import STATIC

ASK: dict[str, Any] = {"prompt": "import os", "max_tokens": 12, "seed": 7, "logprobs": 2}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[str]:
    async with served(opened(folder)) as address:
        yield address


async def post(server: str, body: Any, **more: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server}/v1/completions", data=data, **{"headers": JSON, **more}) as answer,
    ):
        return answer.status, await answer.json()


async def streamed(server: str, body: Any) -> list[Any]:
    """The data of all events."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server}/v1/completions", json={**body, "stream": True}) as answer,
    ):
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def get(server: str, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(server + path) as answer:
        return answer.status, await answer.json()


async def test_an_answer_has_what_the_protocol_says_and_the_posterior(server: str) -> None:
    status, told = await post(server, ASK)
    choice = told["choices"][0]
    logs = choice["logprobs"]
    assert (status, told["object"], told["model"]) == (200, "text_completion", "mine")
    assert told["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert choice["finish_reason"] == "length"
    assert "".join(logs["tokens"]) == choice["text"]
    assert all(len(logs[key]) == 12 for key in logs)
    assert all(value <= 0 for value in logs["token_logprobs"])
    assert all(len(top) <= 2 for top in logs["top_logprobs"])
    assert all(sum(parts.values()) == pytest.approx(1) for parts in logs["posterior"])
    assert set(choice["posterior"]) == {"topics", "encodings", "network"}
    assert sum(choice["posterior"].values()) == pytest.approx(1)
    assert told["flops_per_token"] > 0


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": ["e", "\n"]}, {"temperature": 0}, {"max_tokens": 0}])
async def test_a_stream_tells_the_same_as_an_answer_at_once(server: str, more: dict[str, Any]) -> None:
    (_, told), parts = await post(server, {**ASK, **more}), await streamed(server, {**ASK, **more})
    whole, choices = told["choices"][0], [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key in whole["logprobs"]:
        assert [value for choice in choices for value in choice["logprobs"][key]] == whole["logprobs"][key]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["finish_reason"]]
    assert choices[-1]["posterior"] == whole["posterior"]
    assert len({part["id"] for part in parts}) == 1


async def test_text_comes_as_it_is_made(server: str) -> None:
    assert len(await streamed(server, ASK)) >= 12


async def test_the_usage_of_a_stream_comes_if_it_is_asked_for(server: str) -> None:
    last = (await streamed(server, {**ASK, "stream_options": {"include_usage": True}}))[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


async def test_a_stop_sequence_ends_the_text_before_it(server: str) -> None:
    _, whole = await post(server, {**ASK, "max_tokens": 40})
    text = whole["choices"][0]["text"]
    stop = next(text[at : at + 2] for at in range(5, 30) if text[at : at + 2].isascii())
    _, told = await post(server, {**ASK, "max_tokens": 40, "stop": stop})
    assert told["choices"][0]["text"] == text[: text.index(stop)]
    assert told["choices"][0]["finish_reason"] == "stop"


async def test_the_ensemble_and_each_expert_are_models(server: str) -> None:
    _, told = await get(server, "/v1/models")
    assert [model["id"] for model in told["data"]] == ["mine", "topics", "encodings", "network"]
    _, alone = await post(server, {**ASK, "model": "network"})
    assert alone["choices"][0]["posterior"] == {"network": 1.0}


async def test_it_says_whether_it_is_well(folder: Path) -> None:
    asking = opened(folder)
    async with served(asking) as server:
        assert await get(server, "/healthz") == (200, {"ok": True, "experts": 3, "lost": 0})
        for index in range(3):
            asking.pool.lose(index, "gone")
        assert await get(server, "/healthz") == (503, {"ok": False, "experts": 3, "lost": 3})
        status, told = await post(server, ASK)
        assert (status, told["error"]["type"], told["error"]["code"]) == (503, "server_error", "no_experts")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_an_error_of_the_protocol(server: str, stream: bool) -> None:
    status, told = await post(server, {"prompt": "x", "best_of": 3, "stream": stream})
    assert status == 400
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (told["error"]["type"], told["error"]["param"]) == ("invalid_request_error", "best_of")
    status, told = await post(server, {"model": "gpt-4", "prompt": "x", "stream": stream})
    assert (status, told["error"]["code"]) == (404, "model_not_found")


async def test_what_goes_wrong_within_a_stream_is_its_last_event(folder: Path) -> None:
    asking = opened(folder)
    async with served(asking) as server, aiohttp.ClientSession() as session:
        body = {**ASK, "max_tokens": 4000, "stream": True}
        async with session.post(f"{server}/v1/completions", json=body) as answer:
            await answer.content.readline()
            for index in range(3):
                asking.pool.lose(index, "gone")
            last = (await answer.text()).strip().rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "no_experts"


async def test_paths_methods_and_sizes_that_are_wrong_are_errors_of_the_protocol(server: str) -> None:
    assert (await get(server, "/v1/embeddings"))[0] == 404
    assert (await get(server, "/v1/chat/completions"))[0] == 405
    assert (await get(server, "/v1/completions"))[1]["error"]["message"].startswith("GET /v1/completions")
    status, told = await post(server, {"prompt": "x" * (1 << 21)})
    assert (status, told["error"]["message"]) == (413, "the request is too long")
    assert (await post(server, ASK, headers={"Content-Type": "text/plain"}))[0] == 415


async def test_a_body_that_does_not_come_is_not_waited_for(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.rpartition(":")[2]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"408"
    writer.close()


async def test_another_page_cannot_ask_through_a_browser(server: str) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "http://evil.example", "Host": "evil.example"}):
        assert (await post(server, ASK, headers={**JSON, **headers}))[0] == 403
    assert (await post(server, ASK, headers={**JSON, "Origin": server}))[0] == 200


async def test_whoever_goes_away_leaves_room_for_others(folder: Path) -> None:
    asking = opened(folder)
    async with served(asking) as server:
        for _ in range(2 * asking.limits.at_once):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{server}/v1/completions", json={**ASK, "max_tokens": 4000, "stream": True}) as answer,
            ):
                await answer.content.readline()
        while (await post(server, ASK))[0] == 429:
            pass  # a line that was cut is noticed when something is written to it
        assert (await post(server, ASK))[0] == 200


@given(body=st.binary(max_size=60) | st.builds(lambda text: json.dumps({"prompt": text}).encode(), st.text()))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_garbage_is_answered_in_json(server: str, body: bytes) -> None:
    status, told = await post(server, body)
    assert status in (200, 400)
    assert ("error" in told) == (status == 400)


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/static/style.css"])
async def test_the_page_loads_nothing_from_elsewhere(server: str, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(server + path) as answer:
        assert answer.status == 200
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert not any("://" in file.read_text() for file in STATIC.iterdir() if file.suffix != ".svg")

"""The web application: OpenAI's protocol under /v1, an input page, health checks and metrics.

Answers, to completions and in chats, come complete or as server-sent events. Three fields extend the protocol:
`posterior` of a choice, the weights of its experts at the end; `posterior` in `logprobs`, each expert's share of each
token's probability; and `flops_per_token` of the answer. A chat has only the first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pier_node.base.http import add_headers, is_from_elsewhere, is_from_here
from pier_node.experts.serving.generation import Answer, Asking, Token
from pier_node.experts.serving.plugging import Plugs
from pier_node.experts.serving.request import ChatRequest, CompletionRequest, Refusal, Request, parse

DONE = b"data: [DONE]\n\n"
STATIC = Path(__file__).parent / "static"
BODY_SECONDS = 30.0
STREAM = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Json = dict[str, Any]
Told = Mapping[Answer, Sequence[Token]]
"""Answers and their tokens, in order."""
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """What Prometheus reads at /metrics.

    Args:
        in_work: returns how many requests are being answered.
        lost: returns how many models cannot be asked any more.
    """

    def __init__(self, in_work: Callable[[], int], lost: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "pier_serve_requests", "requests by path and HTTP status", ["path", "status"], registry=self.registry
        )
        self.tokens = Counter("pier_serve_tokens", "tokens read and generated", ["kind"], registry=self.registry)
        self.seconds = self._seconds("pier_serve_request_seconds", "from a request to the end of its answer")
        self.prompt_seconds = self._seconds("pier_serve_prompt_seconds", "until the first prompt of a request is read")
        self._gauge("pier_serve_requests_in_work", "requests that are being answered", in_work)
        self._gauge("pier_serve_models_lost", "models that cannot be asked any more", lost)

    def _gauge(self, name: str, text: str, value: Callable[[], int]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)


def make_app(asking: Asking, plugs: Plugs | None = None) -> web.Application:
    """The web application of an ensemble or, without `plugs`, of a single model."""
    metrics = Metrics(lambda: asking.in_work, lambda: len(asking.pool.missing))
    app = web.Application(client_max_size=asking.limits.body, middlewares=[_counted(metrics), _explained])
    app.on_response_prepare.append(add_headers)
    service = _Service(asking, metrics)
    app.add_routes(
        [
            web.get("/", _index),
            web.static("/static", STATIC),
            web.get("/healthz", service.healthz),
            web.get("/health", service.healthz),
            web.get("/metrics", service.metrics),
            web.get("/v1/models", service.models),
            web.post("/v1/completions", partial(service.answer, CompletionRequest, CompletionForm)),
            web.post("/v1/chat/completions", partial(service.answer, ChatRequest, ChatForm)),
        ]
    )
    if plugs:
        switch = _Switch(plugs)
        app.add_routes(
            [
                web.get("/v1/experts", switch.experts),
                web.post("/v1/experts/{name}/plug", switch.plug),
                web.post("/v1/experts/{name}/unplug", switch.unplug),
            ]
        )
    return app


def _counted(metrics: Metrics) -> Middleware:
    """Count the requests under /v1 that a route exists for."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = resource.canonical if resource else ""
        begin, status = time.monotonic(), 499  # unless it ends otherwise, the client went away
        try:
            answer = await handler(request)
            status = answer.status
            return answer
        finally:
            if path.startswith("/v1/"):
                metrics.requests.labels(path, status).inc()
                metrics.seconds.observe(time.monotonic() - begin)

    return count


@web.middleware
async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Report every error in the form that the protocol's clients expect."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal.answer()
    except web.HTTPRequestEntityTooLarge:
        return Refusal(413, "the request is too long", "too_long").answer()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return Refusal(error.status, f"{request.method} {request.path[:100]}: {error.reason}").answer()
    except Exception:
        log.exception("a request failed")
        return Refusal(500, "this request failed; the log of the server says why").answer()


async def _index(_request: web.Request) -> web.StreamResponse:
    """A page that takes prompts."""
    return web.FileResponse(STATIC / "index.html")


async def _body(request: web.Request) -> bytes:
    """The body of a request that may be answered. Raises Refusal."""
    if is_from_elsewhere(request):
        raise Refusal(403, "this request comes from another page")
    if request.content_type != "application/json":
        raise Refusal(415, "the body must be sent as application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s", "timeout") from None


class _Switch:
    """Who answers, and turning experts on and off: only for this machine, as there is no password."""

    def __init__(self, plugs: Plugs) -> None:
        self._plugs = plugs

    async def experts(self, _request: web.Request) -> web.Response:
        """All experts, with their states."""
        return web.json_response({"object": "list", "data": self._plugs.told()})

    async def plug(self, request: web.Request) -> web.Response:
        """Let an expert answer from the next request on."""
        await self._plugs.plug(self._name(request))
        return await self.experts(request)

    async def unplug(self, request: web.Request) -> web.Response:
        """Let an expert answer no more."""
        await self._plugs.unplug(self._name(request))
        return await self.experts(request)

    def _name(self, request: web.Request) -> str:
        if is_from_elsewhere(request) or not is_from_here(request):
            raise Refusal(403, "experts are plugged and unplugged from the server's own machine only")
        return request.match_info["name"]


class _Service:
    def __init__(self, asking: Asking, metrics: Metrics) -> None:
        self._asking, self._metrics = asking, metrics

    async def healthz(self, _request: web.Request) -> web.Response:
        """Healthy as long as an expert can be asked."""
        alive, missing = self._asking.pool.alive, self._asking.pool.missing
        body = {"ok": bool(alive), "experts": len(alive) + len(missing), "lost": len(missing)}
        return web.json_response(body, status=200 if alive else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        """For Prometheus."""
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _request: web.Request) -> web.Response:
        """The ensemble, and each expert by itself."""
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "pier"} for name in self._asking.models]
        return web.json_response({"object": "list", "data": models})

    async def answer(self, kind: type[Request], made: type[CompletionForm], request: web.Request) -> web.StreamResponse:
        """Continue prompts, or answer the last message of a chat."""
        wanted = parse(await _body(request), kind)
        form = made(wanted.model or self._asking.name, wanted.best is not None)
        if wanted.stream:
            return await self._stream(request, wanted, form)
        told: dict[Answer, list[Token]] = {}
        async with aclosing(self._told(wanted)) as parts:
            async for answer, tokens in parts:
                told.setdefault(answer, []).extend(tokens)
        return web.json_response(form.whole(told))

    async def _stream(self, request: web.Request, wanted: Request, form: CompletionForm) -> web.StreamResponse:
        """Errors before the first token are normal responses; afterwards they are events."""
        stream, told = web.StreamResponse(headers=STREAM), dict[Answer, list[Token]]()
        try:
            async with aclosing(self._told(wanted)) as parts:
                async for answer, tokens in parts:
                    if not stream.prepared:
                        await stream.prepare(request)
                    told[answer] = []
                    await stream.write(_event(form.part(tokens, answer)))
            if wanted.stream_options.include_usage:
                await stream.write(_event(form.counts(told)))
            await stream.write(DONE)
        except ConnectionResetError:
            log.info("somebody went away before the end")
        except Refusal as refusal:
            if not stream.prepared:
                raise
            await stream.write(_event(refusal.body()))
        return stream

    async def _told(self, wanted: Request) -> AsyncGenerator[tuple[Answer, list[Token]], None]:
        """Tokens as they can be released; the last ones come when it is known why the text ended."""
        begin = time.monotonic()
        async with self._asking.begin(wanted) as answers:
            async for answer in answers:
                if answer.index == 0:
                    self._metrics.prompt_seconds.observe(time.monotonic() - begin)
                if echoed := answer.echoed():
                    yield answer, echoed
                while not answer.finish:
                    tokens = await self._asking.compute(answer.step)
                    if tokens or answer.finish:
                        yield answer, tokens
                self._metrics.tokens.labels("prompt").inc(0 if answer.index % wanted.n else answer.prompt_tokens)
                self._metrics.tokens.labels("completion").inc(answer.made)


class CompletionForm:
    """An answer to a completion as JSON, complete or in parts, which share this.

    Answers come one after the other, each in its order: `_choice` notes which answer it is at and, with `_logs`, how
    many characters of its text it has passed. So what depends on the answer before is looked up before that call.

    Args:
        model: name of the model.
        logprobs: whether they were requested.
    """

    kind, part_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, logprobs: bool) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._index, self._offset = -1, 0

    def whole(self, told: Told) -> Json:
        """All answers to a request, complete."""
        choices = [self._choice(tokens, answer) for answer, tokens in told.items()]
        flops = [*told][-1].flops_per_token
        return {**self._head, "object": self.kind, "choices": choices, "usage": _usage(told), "flops_per_token": flops}

    def part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """A part of an answer; the last one contains the finish reason."""
        return {**self._head, "object": self.part_kind, "choices": [self._part(tokens, answer)]}

    def counts(self, told: Told) -> Json:
        """The end of a stream, if its usage was requested."""
        return {**self._head, "object": self.part_kind, "choices": [], "usage": _usage(told)}

    def _part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        return self._choice(tokens, answer)

    def _choice(self, tokens: Sequence[Token], answer: Answer) -> Json:
        if answer.index != self._index:
            self._index, self._offset = answer.index, 0
        choice = {
            "index": answer.index,
            "text": "".join(token.text for token in tokens),
            "logprobs": self._logs(tokens) if self._logprobs else None,
            "finish_reason": answer.finish or None,
        }
        return {**choice, "posterior": answer.posterior} if answer.finish else choice

    def _logs(self, tokens: Sequence[Token]) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [token.top for token in tokens],
            "text_offset": offsets,
            "posterior": [token.parts for token in tokens],
        }


class ChatForm(CompletionForm):
    """The same for a chat."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, tokens: Sequence[Token], answer: Answer) -> Json:
        choice = super()._choice(tokens, answer)
        message = {"role": "assistant", "content": choice.pop("text"), "refusal": None}
        return {**choice, "message": message}

    def _part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        role = {} if answer.index == self._index else {"role": "assistant"}
        choice = super()._choice(tokens, answer)
        delta = {**role, "content": choice.pop("text")}
        return {**choice, "delta": delta}

    def _logs(self, tokens: Sequence[Token]) -> Json:
        return {
            "content": [
                {
                    **_log(token.text, token.log_prob or 0.0),
                    "top_logprobs": [_log(*each) for each in (token.top or {}).items()],
                }
                for token in tokens
            ],
            "refusal": None,
        }


def _log(text: str, log_prob: float) -> Json:
    return {"token": text, "logprob": log_prob, "bytes": [*text.encode()]}


def _usage(told: Told) -> Json:
    """Token counts of a request: each prompt counts once."""
    prompts = {answer.prompt: answer.prompt_tokens for answer in told}
    asked, made = sum(prompts.values()), sum(answer.made for answer in told)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def _event(told: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(told)}\n\n".encode()

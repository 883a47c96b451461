"""The web application: the completions protocol under /v1, an input page, and a health check.

Answers use the JSON of the completions protocol, complete or as server-sent events. Three fields extend the protocol:
`posterior` of a choice, the weights of its experts at the end; `posterior` in `logprobs`, each expert's share of each
token's probability; and `flops_per_token` of the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from pier_node.base.http import add_headers, is_from_elsewhere
from pier_node.experts.serving.queue import Answer, Asking, Token
from pier_node.experts.serving.request import CompletionRequest, Refusal, parse

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Form:
    """What all parts of one answer share.

    Args:
        model: name of the model.
        logprobs: whether they were requested.
    """

    def __init__(self, model: str, logprobs: bool) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs, self._offset = logprobs, 0

    def whole(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """The complete answer."""
        return {**self.part(tokens, answer), "usage": usage(answer), "flops_per_token": answer.flops_per_token}

    def part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """A part of the answer; the last one contains the finish reason."""
        choice: Json = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": self._logs(tokens) if self._logprobs else None,
            "finish_reason": answer.finish or None,
        }
        if answer.finish:
            choice["posterior"] = answer.posterior
        return {**self._head, "choices": [choice]}

    def counts(self, answer: Answer) -> Json:
        """The end of a stream, if its usage was requested."""
        return {**self._head, "choices": [], "usage": usage(answer)}

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


def usage(answer: Answer) -> Json:
    """Token counts of an answer."""
    total = answer.prompt_tokens + answer.made
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.made, "total_tokens": total}


def event(told: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(told)}\n\n".encode()


STATIC = Path(__file__).parent / "static"
BODY_SECONDS = 30.0
STREAM = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(asking: Asking) -> web.Application:
    """The web application of an ensemble."""
    app = web.Application(client_max_size=asking.limits.body, middlewares=[_explained])
    app.on_response_prepare.append(add_headers)
    service = _Service(asking)
    app.add_routes(
        [
            web.get("/", _index),
            web.static("/static", STATIC),
            web.get("/healthz", service.healthz),
            web.get("/v1/models", service.models),
            web.post("/v1/completions", service.completions),
        ]
    )
    return app


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
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s", "timeout") from None


class _Service:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def healthz(self, _request: web.Request) -> web.Response:
        """Healthy as long as an expert can be asked."""
        alive, all_of_them = self._asking.pool.alive, self._asking.experts
        body = {"ok": bool(alive), "experts": len(all_of_them), "lost": len(all_of_them) - len(alive)}
        return web.json_response(body, status=200 if alive else 503)

    async def models(self, _request: web.Request) -> web.Response:
        """The ensemble, and each expert by itself."""
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "pier"} for name in self._asking.models]
        return web.json_response({"object": "list", "data": models})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a prompt."""
        if is_from_elsewhere(request):
            raise Refusal(403, "this request comes from another page")
        if request.content_type != "application/json":
            raise Refusal(415, "the body must be sent as application/json")
        wanted = parse(await _body(request))
        form = Form(wanted.model or self._asking.name, wanted.logprobs is not None)
        if wanted.stream:
            return await self._stream(request, wanted, form)
        async with self._asking.begin(wanted) as answer:
            tokens = [token async for some in self._told(answer) for token in some]
            return web.json_response(form.whole(tokens, answer))

    async def _stream(self, request: web.Request, wanted: CompletionRequest, form: Form) -> web.StreamResponse:
        """Errors before the prompt is read are normal responses; afterwards they are events."""
        stream = web.StreamResponse(headers=STREAM)
        try:
            async with self._asking.begin(wanted) as answer:
                await stream.prepare(request)
                async for tokens in self._told(answer):
                    await stream.write(event(form.part(tokens, answer)))
                if wanted.stream_options.include_usage:
                    await stream.write(event(form.counts(answer)))
                await stream.write(DONE)
        except ConnectionResetError:
            log.info("somebody went away before the end")
        except Refusal as refusal:
            if not stream.prepared:
                raise
            await stream.write(event(refusal.body()))
        return stream

    async def _told(self, answer: Answer) -> AsyncIterator[list[Token]]:
        """Tokens as they can be released; the last ones come when it is known why the text ended."""
        if echoed := answer.echoed():
            yield echoed
        while not answer.finish:
            tokens = await self._asking.compute(answer.step)
            if tokens or answer.finish:
                yield tokens

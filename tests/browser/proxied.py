"""A reverse proxy, as nginx is without further settings: it passes on everything, but sends its own Host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

HOP_BY_HOP = {"host", "connection", "transfer-encoding", "keep-alive", "content-length", "content-encoding"}


@asynccontextmanager
async def proxied(to: str) -> AsyncIterator[int]:
    """The port of a proxy in front of an address."""
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP_BY_HOP}
            body = await request.read()
            async with session.request(request.method, to + request.path_qs, headers=headers, data=body) as answer:
                kept = {
                    key: value
                    for key, value in answer.headers.items()
                    if key.lower() not in HOP_BY_HOP - {"content-encoding"}
                }
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from pier_node.base.http import has_other_origin, is_from_elsewhere, is_known, make_runner

JUNK = [
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("sent", [*JUNK, b"GET /fail HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_only_an_error_of_ours_is_logged(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_request: web.Request) -> web.Response:
        raise RuntimeError

    async def read(request: web.Request) -> web.Response:
        return web.Response(text=await request.text())

    app = web.Application()
    app.add_routes([web.get("/fail", fail), web.post("/read", read)])
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(sent)
    answer = await reader.readline()
    writer.close()
    await runner.cleanup()
    fails = sent not in JUNK
    assert (b" 500 " if fails else b" 400 ") in answer
    assert ("Traceback" in caplog.text) == fails


@pytest.mark.parametrize("host", ["127.0.0.1:7720", "[::1]:7720", "localhost", "LOCALHOST:80", "10.0.0.3"])
def test_addresses_and_localhost_are_known(host: str) -> None:
    assert is_known(host)


def test_this_machine_and_names_that_were_given_are_known() -> None:
    assert is_known(f"{socket.gethostname()}:7720")
    assert is_known("Lab.Example:1", {"lab.example"})
    assert is_known("lab.example", {"Lab.Example:8443"})


@pytest.mark.parametrize("host", ["evil.example", "", "127.0.0.1.evil.example", "[::1", "localhost.evil.example:7720"])
def test_other_names_are_not(host: str) -> None:
    assert not is_known(host)


@pytest.mark.parametrize(
    ("headers", "other", "elsewhere"),
    [
        ({"Host": "evil.example"}, False, False),  # no browser sends that
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, False, False),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, True, True),
        ({"Host": "localhost:1", "Origin": "null"}, True, True),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, False, True),
    ],
)
def test_another_page_is_told_by_its_origin(headers: dict[str, str], other: bool, elsewhere: bool) -> None:
    request = make_mocked_request("POST", "/", headers)
    assert (has_other_origin(request), is_from_elsewhere(request)) == (other, elsewhere)


@pytest.mark.parametrize(
    ("names", "origin", "other"),
    [
        ((), "https://lab.example", True),
        (("Lab.example",), "https://lab.example", False),
        (("lab.example",), "https://lab.example:8443", True),
        (("lab.example:8443",), "https://lab.example:8443", False),
    ],
)
def test_a_page_behind_a_proxy_that_changes_the_host_is_told_by_its_name(
    names: tuple[str, ...], origin: str, other: bool
) -> None:
    request = make_mocked_request("POST", "/", {"Host": "127.0.0.1:7780", "Origin": origin})
    assert has_other_origin(request, names) is other

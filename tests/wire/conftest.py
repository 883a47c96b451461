"""Sites with TLS and without."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator

import pytest
from wire.grpc_sites import Pair, Sites


@pytest.fixture(params=[True, False], ids=["tls", "insecure"])
def sites(request: pytest.FixtureRequest) -> Sites:
    return Sites(request.param)


@pytest.fixture
async def pair(sites: Sites) -> AsyncGenerator[Pair]:
    """Alice and Bob, who know each other."""
    async with sites.pair() as both:
        yield both


@pytest.fixture
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that happens in the test is a surprise to the libraries below, or to the carrier."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []

"""Sites with either carrier, with TLS and without."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from typing import get_args

import pytest
from _pytest.mark import ParameterSet
from wire.sites import Pair, Sites

from pier_node.wire.transport import Transport

EVERY_KIND = [Sites(secure, transport) for transport in get_args(Transport) for secure in (True, False)]


def kind(sites: Sites) -> ParameterSet:
    """Every site on libp2p has a process beside it."""
    name = f"{sites.transport}{'' if sites.secure else '-insecure'}"
    marks = [pytest.mark.processes] if sites.transport == "hivemind" else []
    return pytest.param(sites, id=name, marks=marks)


@pytest.fixture(params=map(kind, EVERY_KIND))
def sites(request: pytest.FixtureRequest) -> Sites:
    assert isinstance(request.param, Sites)
    return request.param


@pytest.fixture(params=map(kind, EVERY_KIND[::2]))
def secured(request: pytest.FixtureRequest) -> Sites:
    """Only those that hold the run's token against strangers."""
    assert isinstance(request.param, Sites)
    return request.param


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

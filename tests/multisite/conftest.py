"""Scenarios get a world of real sites, in network namespaces or in containers.

Namespaces are there at once, containers need an image of the working tree. So scenarios run in namespaces where this
machine has them; test_driver.py and test_compose.py run in containers always, and `scripts/test --all` has all do so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from multisite.containers import NO_DOCKER, build_image, containers, docker_answers
from multisite.namespaces import namespaces
from multisite.places import Network
from multisite.world import COORDINATOR, MakeWorld, World
from processes.hosts import have_namespaces

CHOICE = "PIER_PLACES"
"""Environment variable for who wants other places than those above: docker or namespaces."""


@pytest.fixture(scope="session")
def image() -> None:
    """The image of this working tree."""
    if not docker_answers():
        pytest.skip(NO_DOCKER)
    build_image()


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest) -> str:
    """What sites run in: docker or namespaces."""
    chosen = getattr(request, "param", None) or os.environ.get(CHOICE)
    return str(chosen or ("namespaces" if have_namespaces() or not docker_answers() else "docker"))


@pytest.fixture(scope="session")
def network(places: str, request: pytest.FixtureRequest) -> Network:
    """Makes places. Skips the test where that cannot be."""
    if places == "namespaces":
        return namespaces
    request.getfixturevalue("image")
    return containers


@pytest.fixture
def world(tmp_path: Path, network: Network, request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    """Makes the world of a test: `world({"a": 20, "b": 50}, coordinator=True, outer={...})`; see world.py."""
    failures, worlds, stack = request.session.testsfailed, list[World](), ExitStack()

    def make(
        rates: Mapping[str, float],
        coordinator: bool = False,
        options: Mapping[str, Sequence[str]] | None = None,
        **tables: dict[str, Any],
    ) -> World:
        names = [*rates, *([COORDINATOR] if coordinator else [])]
        made = World(tmp_path, stack.enter_context(network(tmp_path, names)), rates, options or {}, tables)
        stack.callback(made.kill)
        worlds.append(made)
        made.begin()
        return made

    with stack:
        yield make
    for each in worlds:
        if request.session.testsfailed > failures:
            print(each.tails())
        each.check()

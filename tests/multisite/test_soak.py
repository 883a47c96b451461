"""Ten sites, and one fault after the other: the rest goes on through each, all are together in the end, nothing grows.

Which fault comes when, and at which site, is drawn from a seed, so that a soak can be played again: PIER_SOAK_SEED.
PIER_SOAK_SECONDS makes it longer; 1800 is half an hour.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from multisite.harm import asleep, slowed
from multisite.world import MakeWorld, World
from processes.run import ENDLESS
from processes.site import Site, wait_until

pytestmark = [pytest.mark.multisite, pytest.mark.alone]

SECONDS = float(os.environ.get("PIER_SOAK_SECONDS", "120"))
SEED = int(os.environ.get("PIER_SOAK_SEED", "1"))
NAMES = "abcdefghij"
WITNESSES = "ab"
"""They are never ended, so that what they hold can be compared."""
ROUNDS = 2
"""Of the others, that a fault lasts."""
BACK = 180.0
"""Seconds within which ten sites on two cores are together again."""
MORE_FILES, MORE_MEMORY = 10, 64 << 20


@contextmanager
def killed(run: World, name: str) -> Iterator[None]:
    run[name].kill()
    yield
    run[name].start()


@contextmanager
def away(run: World, name: str) -> Iterator[None]:
    assert run[name].stop() == 0
    yield
    run[name].start()


@contextmanager
def cut_off(run: World, name: str) -> Iterator[None]:
    run.cut(name)
    yield
    run.heal()


@contextmanager
def on_a_narrow_line(run: World, name: str) -> Iterator[None]:
    run.reshape(**{name: 1.0})
    yield
    run.reshape(**{name: 100.0})


@contextmanager
def stopped(run: World, name: str) -> Iterator[None]:
    with asleep(run[name]):
        yield


@contextmanager
def slow(run: World, name: str) -> Iterator[None]:
    with slowed(run[name], 0.3):
        yield


Fault = Callable[[World, str], AbstractContextManager[None]]
ENDING: list[Fault] = [killed, away]
PASSING: list[Fault] = [
    cut_off,
    on_a_narrow_line,
    stopped,
    slow,
]


def together(run: World) -> None:
    """Wait for a round of all."""
    at = run["a"].round
    wait_until(
        "all are together",
        lambda: any(len(event["members"]) == len(NAMES) for event in run["a"].events() if event["round"] > at),
        within=BACK,
    )


def one_fault(run: World, dice: random.Random) -> str:
    """The others go on meanwhile. Whoever was ended may still be coming back when the next fault comes."""
    fault = dice.choice(ENDING + PASSING)
    name = dice.choice([name for name in NAMES if fault in PASSING or name not in WITNESSES])
    run[name].take_part()
    with fault(run, name):
        for witness in set(WITNESSES) - {name}:
            run[witness].reach(run[witness].round + ROUNDS, BACK)
    return f"{fault.__name__} {name}"


def held(site: Site) -> tuple[Counter[str], int]:
    """Open files of its daemon, by kind, and bytes of its memory."""
    links = [os.readlink(file) for file in Path(f"/proc/{site.daemon.pid}/fd").iterdir() if file.is_symlink()]
    return Counter(link.partition(":")[0] for link in links), site.daemon.memory_info().rss


def assert_flat(site: Site, files: Counter[str], memory: int) -> None:
    """Connections that a cut has left behind are noticed after a while."""
    wait_until(f"{site} has no more open than {files}", lambda: held(site)[0].total() <= files.total() + MORE_FILES)
    assert held(site)[1] <= memory + MORE_MEMORY


@pytest.mark.timeout(SECONDS + 1200)
def test_soak(world: MakeWorld) -> None:
    run = world(dict.fromkeys(NAMES, 100.0), run={"sites": 3}, inner=ENDLESS)  # a small corpus, dealt to few
    run.start()
    together(run)
    before = {name: held(run[name]) for name in WITNESSES}
    dice, end = random.Random(SEED), time.monotonic() + SECONDS
    while time.monotonic() < end:
        print(f"{end - time.monotonic():.0f} s left:", one_fault(run, dice), flush=True)
    together(run)
    for name in WITNESSES:
        assert_flat(run[name], *before[name])

"""Which tests run, in which order, and for how long at most.

What cannot be tested on this machine is skipped, and the last lines say so.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings
from rotation import Part, in_part, known_seconds, spread

SLOW = ("processes", "netns", "browser", "multisite", "thorough")
"""Tests with one of these marks are marked `slow` too."""
SLOW_TIMEOUT = 900.0
"""Seconds that a slow test may take, unless it has a `timeout` of its own; pyproject.toml has that of the others."""
SLOW_AT_ONCE = 2
"""Slow tests that run at once, however many cores there are: each starts a handful of processes."""
AGAIN = 10.0
"""Seconds after which a test that has not ended by then is interrupted again."""
NO_CUDA = "no CUDA device here: NOT tested"
LOUD = "NOT tested"
"""In a reason to skip: the last lines repeat it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="N/OF", type=Part.parse, help="of the slow tests, run the smokes and this part of the others"
    )


def pytest_configure() -> None:
    settings.register_profile("busy", deadline=None)  # a fifth of a second is no time on a busy machine
    settings.load_profile("busy")
    # Where a script starts pytest in the background, Ctrl+C is ignored, also by the programs that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    mark_all_but_samples(items)
    for item in items:
        if any(item.get_closest_marker(name) for name in SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
    if part := config.getoption("--part"):
        kept = in_part(items, part)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    yield
    items[:] = in_order(items, getattr(config, "workerinput", {"workercount": 1})["workercount"])
    skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])


def in_order(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """With `-n`, each process gets an equal part of the list: so SLOW_AT_ONCE of them begin with the slow tests.

    These mostly wait, and meanwhile the others have the cores. What runs alone comes last.
    """
    kinds: dict[str, list[pytest.Item]] = {"quick": [], "slow": [], "alone": []}
    for item in items:
        kinds[next((kind for kind in ("alone", "slow") if item.get_closest_marker(kind)), "quick")].append(item)
    found: list[pytest.Item] = []
    quick, part = iter(kinds["quick"]), len(items) // processes
    for files in spread({item.location[0] for item in kinds["slow"]}, known_seconds(), min(processes, SLOW_AT_ONCE)):
        slow = [item for item in kinds["slow"] if item.location[0] in files]
        found += [*slow, *islice(quick, max(0, part - len(slow)))]
    return [*found, *quick, *kinds["alone"]]


def mark_all_but_samples(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sample`, those that are no sample are thorough. Samples are spread evenly."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        mark = same[0].get_closest_marker("sample")
        assert mark
        (count,) = mark.args
        samples = {number * len(same) // count for number in range(count)}
        for number, item in enumerate(same):
            if number not in samples:
                item.add_marker(pytest.mark.thorough)


def skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the clock of pytest-timeout starts
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `-n`, a test marked `alone` waits until the other processes' tests have ended, and they wait for it.

    Slow tests wait for each other, too, in SLOW_AT_ONCE queues.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker:
        return (yield)
    with Path(__file__).open() as lock, _queue(int(worker) % SLOW_AT_ONCE).open("w") as queue:
        if item.get_closest_marker("slow"):
            fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def _queue(number: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pier-tests-{os.getuid()}-{number}.lock"


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Interrupt again and again: a task of asyncio that runs at the deadline takes the first one for its own error."""
    done = yield
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    with _undisturbed():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logreport() -> Generator[None, object, object]:
    with _undisturbed():
        return (yield)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Interrupt nothing meanwhile: an interrupt is meant for the test, and would end pytest."""
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        if LOUD in reason:
            terminalreporter.write_line(f"SKIPPED {report.nodeid}: {reason.removeprefix('Skipped: ')}", yellow=True)

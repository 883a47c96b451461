from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from coordinator.cases import note, open_store

from pier_coordinator.store.facts import Fact
from pier_coordinator.store.store import LOG_NAME

TESTS = Path(__file__).parents[2]
VICTIM = """
import asyncio, sys
from pathlib import Path
from coordinator.cases import note, open_store

async def main() -> None:
    store = open_store(Path(sys.argv[1]))
    async def write(writer: int) -> None:
        while True:
            (fact,) = await store.add_facts([note(str(writer))])
            print(fact.number, flush=True)
    await asyncio.gather(*map(write, range(20)))

asyncio.run(main())
"""


def logged(folder: Path) -> list[Fact]:
    return [Fact.parse(line) for line in (folder / LOG_NAME).read_text().splitlines()]


async def reopened(folder: Path) -> list[Fact]:
    store = open_store(folder)
    facts = list(store.facts())
    await store.close()
    return facts


@pytest.mark.parametrize("after", [1, 30, 500])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, after: int) -> None:
    path = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", VICTIM, str(tmp_path)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path)
    assert victim.stdout is not None
    acknowledged = [int(victim.stdout.readline()) for _ in range(after)]
    victim.kill()
    rest = victim.stdout.read()
    acknowledged += [int(line) for line in rest[: rest.rfind("\n") + 1].splitlines()]  # the last one may be torn
    victim.wait()
    facts = asyncio.run(reopened(tmp_path))
    assert {fact.number for fact in facts} >= set(acknowledged)
    assert [fact.number for fact in facts] == list(range(1, len(facts) + 1))
    assert logged(tmp_path) == facts


async def test_a_torn_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.add_facts([note("a"), note("b"), note("c")])
    await store.close()
    path = tmp_path / LOG_NAME
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        await open_store(tmp_path).close()
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 5000)  # what some file systems leave after a power cut
    await open_store(tmp_path).close()
    assert path.read_bytes() == whole


async def test_what_only_the_log_has_goes_back_into_the_database(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.add_facts([note("a")])
    await store.close()
    ahead = Fact(2.0, "event", "", {"level": 20, "text": "committed, and lost in a power cut"}, 2)
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write(f"{ahead.line()}\n")
    again = open_store(tmp_path)
    assert list(again.facts(after=1)) == [ahead]
    (added,) = await again.add_facts([note("b")])
    assert added.number == 3
    await again.close()


async def test_a_log_that_the_disk_does_not_take_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    await store.add_facts([note("a")])
    with monkeypatch.context() as patch:
        patch.setattr("pier_coordinator.store.log.EventLog.append", _no_room)
        await store.add_facts([note("b")])
        await store.add_facts([note("c")])
    assert [fact.number for fact in logged(tmp_path)] == [1]
    await store.add_facts([note("d")])
    assert logged(tmp_path) == list(store.facts())
    await store.close()


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")

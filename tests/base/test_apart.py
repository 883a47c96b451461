from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from pier_node.base.processes import Answer, answer

PROGRAM = """
import sys
from pathlib import Path
heard = sys.stdin.read()
if sys.argv[1] == "answer":
    print(heard.upper(), end="")
    print("said", end="", file=sys.stderr)
    sys.exit(3)
Path("begun").touch()
while True: pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "played_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "played_program"


async def test_it_is_heard_and_answers(module: str) -> None:
    assert await answer(module, "answer", stdin=b"asked", within=60.0) == Answer(b"ASKED", "said", 3)


async def test_one_that_takes_too_long_is_ended(module: str, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await answer(module, "go on", within=0.2, cwd=tmp_path)
    assert not _running(module)


async def test_it_ends_with_who_waits_for_it(module: str, tmp_path: Path) -> None:
    waiting = asyncio.create_task(answer(module, "go on", cwd=tmp_path))
    async with asyncio.timeout(60.0):
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not _running(module)


def _running(module: str) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if module in child.cmdline()]

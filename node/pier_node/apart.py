"""A module of Pier's run as a program of its own, which ends with whoever waits for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a program wrote to stdout, said on stderr, and ended with."""

    output: bytes
    errors: str
    code: int


async def answer(module: str, *words: str, stdin: bytes = b"", within: float | None = None, **how: Any) -> Answer:
    """Run `python -m module words`.

    Args:
        within: seconds; None: as long as it takes.
        how: more for asyncio.create_subprocess_exec.

    Raises:
        TimeoutError: it took longer; an OSError, too.
        OSError: it cannot be started.
    """
    pipe, program = asyncio.subprocess.PIPE, (sys.executable, "-m", module, *words)
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe, **how)
    try:
        async with asyncio.timeout(within):
            output, errors = await process.communicate(stdin)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
    return Answer(output, errors.decode(errors="replace"), code)

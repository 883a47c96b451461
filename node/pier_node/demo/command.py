"""One of Pier's commands as the demo types it: what it prints is wanted, and it ends with whoever waits for that."""

from __future__ import annotations

import asyncio
import os
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pier_node.errors import PierError

WIDTH = "150"


async def output(program: str, *words: str) -> str:
    """What it prints. Raises PierError: it does not go well."""
    async with started(program, *words) as process:
        printed, errors = await process.communicate()
    if process.returncode:
        raise PierError(f"{program} {words[0]}: {errors.decode(errors='replace').strip()}")
    return printed.decode()


@asynccontextmanager
async def started(program: str, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, its output in pipes; it is asked to end after the block if it runs then."""
    process = await asyncio.create_subprocess_exec(
        Path(sysconfig.get_path("scripts")) / program,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": WIDTH},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

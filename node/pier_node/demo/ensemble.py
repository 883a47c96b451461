"""The end of a demo of experts: the ensemble is scored, served, and asked once, by the commands that anybody uses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from pier_node.demo.command import output, started
from pier_node.errors import PierError

ROWS = "60"
"""Of each domain and split that are scored."""
PROMPT, TOKENS = "import ", 160
DEADLINE = 600.0
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


async def show_ensemble(folder: Path, console: Console) -> dict[str, Any]:
    """Print how good it is and what it says; returns the scores. Raises PierError: it cannot be scored or served."""
    async with _in_time(folder):
        report = json.loads(await output("pier-node", "score", str(folder), "--rows", ROWS, "--json"))
        console.print(_best(report), highlight=False, soft_wrap=True)
        async with _served(folder) as address, aiohttp.ClientSession() as session:
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 1, "logprobs": 0}
            async with session.post(f"{address}/completions", json=body) as answer:
                told = await answer.json()
    console.print(_coloured(told["choices"][0]["logprobs"]), highlight=False)
    console.print(f"Type into it yourself: pier-node serve --experts {folder}", highlight=False, soft_wrap=True)
    return dict(report)


@asynccontextmanager
async def _in_time(folder: Path) -> AsyncIterator[None]:
    """Raises PierError when it takes too long."""
    try:
        async with asyncio.timeout(DEADLINE):
            yield
    except TimeoutError as error:
        raise PierError(
            f"the ensemble of {folder} was not scored and served within {DEADLINE:.0f} s",
            f"Other programs may want the processors. Try by hand: pier-node score {folder}",
        ) from error


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[str]:
    """Where the ensemble answers, until the end of the block."""
    words = "serve", "--experts", str(folder), "--listen", "127.0.0.1:0", "--quiet"
    async with started("pier-node", *words) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = b""
        while not (found := re.search(rb"base_url = (\S+),", said)):
            line = await process.stdout.readline()
            if not line:
                complaint = (await process.stderr.read()).decode(errors="replace").strip()
                raise PierError(f"pier-node serve: {complaint}")
            said += line
        yield found[1].decode()


def _best(report: dict[str, Any]) -> str:
    """The mean of all domains, in a line."""
    mean = {name: f"{standing['bits_per_byte']:.3f}" for name, standing in report["mean"].items()}
    return "Bits per byte, mean of all domains: " + ", ".join(f"{name} {bits}" for name, bits in mean.items())


def _coloured(logs: dict[str, Any]) -> Text:
    """What it said, each token in the colour of the expert that most of it came from, and whose colours they are."""
    names = list(logs["posterior"][0])
    colours = dict(zip(names, COLOURS * len(names)))
    text = Text(f"It goes on from {PROMPT!r}: ")
    for token, parts in zip(logs["tokens"], logs["posterior"]):
        text.append(token, colours[max(parts, key=parts.__getitem__)])
    text.append("\nColours: ")
    for name in names:
        text.append(f"{name} ", colours[name])
    return text

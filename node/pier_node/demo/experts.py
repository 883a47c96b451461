"""`pier-node demo --experts`: unequal sites train a seed model together, and then an expert for each domain.

At the end the ensemble is scored, served and asked once, with the commands that a user would run.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from pier_node.base.errors import PierError
from pier_node.base.log import print_as_is
from pier_node.base.units import UNKNOWN
from pier_node.demo.replicas import PRESET
from pier_node.demo.sites import RUN_FILE, Demo, claimed, output, started, throttle

ROWS = "60"
"""Number of rows to score per domain and split."""
PROMPT, TOKENS = "import ", 160
DEADLINE = 600.0
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
SHARES = {"alpha": 1.0, "beta": 0.7, "gamma": 0.45}
"""The fraction of the time that each site's workers may run."""
EXPERTS_FILE, ENSEMBLE_FOLDER = "experts.toml", "ensemble"
AT_WORK = "training"

_RUN = f"""\
[run]
name = "demo-experts"
sites = {len(SHARES)}

[model]
preset = "{PRESET}"

[inner]
total_steps = 96
batch_size = 4
lr = 1.5e-3
min_lr = 3e-4
warmup_steps = 8
eval_every = 0
eval_batches = 2

[outer]
algorithm = "diloco"
inner_steps = 16
"""
_EXPERTS = f"""\
[experts]
steps = [30, 45, 60]
batch_size = 8
lr = 1e-3
min_lr = 1e-4
warmup_steps = 5

[model]
preset = "{PRESET}"

[plan]
time_limit_s = 2.0
"""
DOMAINS = ("topics", "network", "formats", "concurrency", "numbers", "encodings")


def run_experts_demo(folder: Path, as_json: bool) -> None:
    """Run the demo and print the result: every domain then has its expert or the parent that stands in for it.

    Raises:
        PierError: it could not be completed.
        KeyboardInterrupt: the user stopped it.
    """
    with claimed(folder) as work:
        (work / RUN_FILE).write_text(_RUN)
        (work / EXPERTS_FILE).write_text(_EXPERTS + "".join(f'\n[[domains]]\nname = "{name}"\n' for name in DOMAINS))
        demo = Demo(work, as_json)
        demo.finish(demo.perform(_ensemble(demo)))


async def _ensemble(demo: Demo) -> dict[str, Any]:
    """From the start of the sites to the ensemble's folder, and what it can do."""
    clock = asyncio.get_running_loop().time
    began, sites, ensemble = clock(), demo.sites.all, demo.work / ENSEMBLE_FOLDER

    def say(text: str) -> None:
        print_as_is(demo.console, f"{clock() - began:4.0f} s  {text.rstrip()}")

    async with AsyncExitStack() as stack:
        page = await demo.start()
        for site in sites:
            slow = asyncio.create_task(throttle(site, SHARES[site.name]))
            stack.callback(slow.cancel)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)))
        shares = ", ".join(f"{name} {share:.0%}" for name, share in SHARES.items())
        say(f"The run's page: {page}. Workers may run for so much of the time: {shares}.")
        await _all_at_work(demo, page, session)
        say("All sites train the seed: planning the experts meanwhile.")
        data = ("--data", str(demo.sites.coordinator.folder))
        say(await output("pier-coordinator", "experts", "start", str(demo.work / EXPERTS_FILE), *data, "--yes"))
        told = await _trained(demo, page, session, say)
        folders = [word for site in sites for word in ("--from", str(site.folder))]
        say(await output("pier-coordinator", "experts", "collect", str(ensemble), *data, *folders))
        print_as_is(demo.console, await output("pier-coordinator", "experts", "status", *data))
    scores = await show_ensemble(ensemble, demo.console)
    return {**told, "scores": scores, "ensemble": str(ensemble), "measured_seconds": clock() - began}


async def _all_at_work(demo: Demo, page: str, session: aiohttp.ClientSession) -> None:
    """Return when each site has trained for long enough to know its speed. Raises PierError: a site has ended."""
    async for _ in demo.ticks(lambda: "waiting"):
        for site in demo.sites.all:
            if not site.running:
                raise PierError(site.obituary)
        async with session.get(f"{page}/api/nodes") as answer:
            rows = (await answer.json())["sites"]
        if sum(row["state"] == AT_WORK and bool(row["tokens_per_second"]) for row in rows) == len(SHARES):
            return


async def _trained(demo: Demo, page: str, session: aiohttp.ClientSession, say: Callable[[str], None]) -> dict[str, Any]:
    """The coordinator's report once all experts are trained; each one is announced."""
    token = (demo.sites.coordinator.folder / "operator.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    known: set[int] = set()
    told: dict[str, Any] = {"experts": []}

    def news() -> object:
        done = [(row["done"], row["site"]) for row in told["experts"]]
        return done, [(site.code, site.log.stat().st_size) for site in demo.sites.all]

    async for _ in demo.ticks(news):
        async with session.post(f"{page}/api/actions/experts-told", json={}, headers=headers) as answer:
            told = await answer.json()
        for row in told["experts"]:
            if row["name"] and row["number"] not in known:
                known.add(row["number"])
                say(_announced(row))
        if told["complete"]:
            break
    return told


def _announced(row: dict[str, Any]) -> str:
    gate = "accepted" if row["accepted"] else "refused, its parent stands in"
    losses = f"{row['parent_loss']:.3f} -> {row['loss']:.3f} bits per byte"
    what = f"{row['domain']} ({row['size']}, {row['steps']} steps)"
    return f"{row['site'] or UNKNOWN} has the expert of {what}: {losses}, {gate}"


async def show_ensemble(folder: Path, console: Console) -> dict[str, Any]:
    """Print the ensemble's quality and a sample.

    Returns the scores. Raises PierError: it cannot be scored or served.
    """
    try:
        async with asyncio.timeout(DEADLINE):
            report = json.loads(await output("pier-node", "score", str(folder), "--rows", ROWS, "--json"))
            console.print(_best(report), highlight=False, soft_wrap=True)
            async with _served(folder) as address, aiohttp.ClientSession() as session:
                body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 1, "logprobs": 0}
                async with session.post(f"{address}/completions", json=body) as answer:
                    told = await answer.json()
    except TimeoutError as error:
        raise PierError(
            f"the ensemble of {folder} was not scored and served within {DEADLINE:.0f} s",
            f"Other programs may want the processors. Try by hand: pier-node score {folder}",
        ) from error
    console.print(_coloured(told["choices"][0]["logprobs"]), highlight=False)
    print_as_is(console, f"Type into it yourself: pier-node serve --experts {folder}")
    return dict(report)


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[str]:
    """Serve the ensemble until the end of the block; yields its address."""
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
    """The mean of all domains in one line."""
    mean = {name: f"{standing['bits_per_byte']:.3f}" for name, standing in report["mean"].items()}
    return "Bits per byte, mean of all domains: " + ", ".join(f"{name} {bits}" for name, bits in mean.items())


def _coloured(logs: dict[str, Any]) -> Text:
    """The sample with each token in the colour of the expert that contributed most to it, and a legend."""
    names = list(logs["posterior"][0])
    colours = dict(zip(names, COLOURS * len(names)))
    text = Text(f"It continues {PROMPT!r}: ")
    for token, parts in zip(logs["tokens"], logs["posterior"]):
        text.append(token, colours[max(parts, key=parts.__getitem__)])
    text.append("\nColours: ")
    for name in names:
        text.append(f"{name} ", colours[name])
    return text

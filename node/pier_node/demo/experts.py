"""`pier-node demo --experts`: unequal sites train a seed model together, and then an expert for each domain.

At the end the ensemble is scored, served and asked once, with the commands that a user would run.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from pier_node.base.errors import PierError
from pier_node.base.units import UNKNOWN
from pier_node.demo.folder import claimed
from pier_node.demo.plan import PRESET, threads_for
from pier_node.demo.sites import Sites, output, started, throttle
from pier_node.demo.train import interruptible

ROWS = "60"
"""Number of rows to score per domain and split."""
PROMPT, TOKENS = "import ", 160
DEADLINE = 600.0
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


async def show_ensemble(folder: Path, console: Console) -> dict[str, Any]:
    """Print the ensemble's quality and a sample.

    Returns the scores. Raises PierError: it cannot be scored or served.
    """
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
    """Raises PierError when the block takes longer than DEADLINE seconds."""
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
    text = Text(f"It goes on from {PROMPT!r}: ")
    for token, parts in zip(logs["tokens"], logs["posterior"]):
        text.append(token, colours[max(parts, key=parts.__getitem__)])
    text.append("\nColours: ")
    for name in names:
        text.append(f"{name} ", colours[name])
    return text


SHARES = {"alpha": 1.0, "beta": 0.7, "gamma": 0.45}
"""The fraction of the time that each site's workers may run."""
STILL = 180.0
"""Seconds without news after which the demo gives up."""
LOOK = 0.5
RUN_FILE, EXPERTS_FILE, ENSEMBLE_FOLDER, RESULT_FILE = "run.toml", "experts.toml", "ensemble", "result.json"
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
    console = Console(stderr=as_json)
    with claimed(folder, keep=False) as work:
        (work / RUN_FILE).write_text(_RUN)
        (work / EXPERTS_FILE).write_text(_EXPERTS + "".join(f'\n[[domains]]\nname = "{name}"\n' for name in DOMAINS))
        sites = Sites(work, len(SHARES), threads_for(len(SHARES)))
        told = asyncio.run(interruptible(sites, _ensemble(sites, work, console)))
        if told is None:
            raise KeyboardInterrupt
    (work / RESULT_FILE).write_text(json.dumps(told, indent=1) + "\n")
    if as_json:
        print(json.dumps(told))


async def _ensemble(sites: Sites, work: Path, console: Console) -> dict[str, Any]:
    """From the start of the sites to the ensemble's folder."""
    clock = asyncio.get_running_loop().time
    began = clock()

    def say(text: str) -> None:
        console.print(f"{clock() - began:4.0f} s  {text}", highlight=False, soft_wrap=True)

    async with AsyncExitStack() as stack:
        page = await sites.start(work / RUN_FILE)
        for site in sites.all:
            slow = asyncio.create_task(throttle(site, SHARES[site.name]))
            stack.callback(slow.cancel)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)))
        shares = ", ".join(f"{name} {share:.0%}" for name, share in SHARES.items())
        say(f"The run's page: {page}. Workers may run for so much of the time: {shares}.")
        await _all_at_work(sites, page, session)
        say("All sites train the seed: planning the experts meanwhile.")
        data = ("--data", str(sites.coordinator.folder))
        say((await output("pier-coordinator", "experts", "start", str(work / EXPERTS_FILE), *data, "--yes")).rstrip())
        told = await _trained(sites, page, session, say)
        folders = [word for site in sites.all for word in ("--from", str(site.folder))]
        collect = "experts", "collect", str(work / ENSEMBLE_FOLDER)
        say((await output("pier-coordinator", *collect, *data, *folders)).rstrip())
        console.print(await output("pier-coordinator", "experts", "status", *data), highlight=False, soft_wrap=True)
    scores = await show_ensemble(work / ENSEMBLE_FOLDER, console)
    return {**told, "scores": scores, "ensemble": str(work / ENSEMBLE_FOLDER), "measured_seconds": clock() - began}


async def _all_at_work(sites: Sites, page: str, session: aiohttp.ClientSession) -> None:
    """Return when each site has trained for long enough to know its speed."""

    async def speeds() -> Sequence[float]:
        async with session.get(f"{page}/api/nodes") as answer:
            rows = (await answer.json())["sites"]
        return [row["tokens_per_second"] or 0.0 for row in rows if row["state"] == AT_WORK]

    async with asyncio.timeout(STILL):
        while len([speed for speed in await speeds() if speed]) < len(SHARES):
            _require_all(sites)
            await asyncio.sleep(LOOK)


async def _trained(sites: Sites, page: str, session: aiohttp.ClientSession, say: Any) -> dict[str, Any]:
    """The coordinator's report once all experts are trained; each one is announced."""
    clock, known, news, seen = asyncio.get_running_loop().time, set[int](), None, 0.0
    token = (sites.coordinator.folder / "operator.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        async with session.post(f"{page}/api/actions/experts-told", json={}, headers=headers) as answer:
            told: dict[str, Any] = await answer.json()
        for row in told["experts"]:
            if row["name"] and row["number"] not in known:
                known.add(row["number"])
                say(_announced(row))
        if told["complete"]:
            return told
        rows = [(row["done"], row["site"]) for row in told["experts"]]
        pulses = [site.code for site in sites.all], [path.stat().st_size for path in _logs(sites)]
        if (rows, pulses) != news:
            news, seen = (rows, pulses), clock()
        if clock() - seen > STILL:
            raise PierError(f"nothing has happened for {STILL:.0f} seconds", "Mend what the logs of the sites show.")
        await asyncio.sleep(LOOK)


def _announced(row: dict[str, Any]) -> str:
    gate = "accepted" if row["accepted"] else "refused, its parent stands in"
    losses = f"{row['parent_loss']:.3f} -> {row['loss']:.3f} bits per byte"
    what = f"{row['domain']} ({row['size']}, {row['steps']} steps)"
    return f"{row['site'] or UNKNOWN} has the expert of {what}: {losses}, {gate}"


def _logs(sites: Sites) -> list[Path]:
    return [site.log for site in sites.all if site.log.exists()]


def _require_all(sites: Sites) -> None:
    for site in sites.all:
        if not site.running:
            raise PierError(site.obituary)

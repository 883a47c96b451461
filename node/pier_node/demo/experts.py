"""`pier-node demo --experts`: unequal sites train a seed together, and then an expert for each domain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from pier_node.demo.command import output
from pier_node.demo.ensemble import show_ensemble
from pier_node.demo.folder import claimed
from pier_node.demo.plan import PRESET, threads_for
from pier_node.demo.sites import Sites
from pier_node.demo.throttle import throttle
from pier_node.demo.train import interruptible
from pier_node.errors import PierError
from pier_node.units import UNKNOWN

SHARES = {"alpha": 1.0, "beta": 0.7, "gamma": 0.45}
"""The part of the time that each site's workers may run."""
STILL = 180.0
"""Seconds without any news after which the demo gives up."""
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
    """Run it and print what came out: every domain has its expert then, or what stands in for it.

    Raises:
        PierError: it could not be finished.
        KeyboardInterrupt: somebody ended it.
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
    """What the coordinator knows when all experts are there; each is announced."""
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

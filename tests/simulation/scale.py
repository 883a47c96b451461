"""How far rounds between all sites go, in virtual time: `python -m simulation.scale --sites 64`, in tests/.

Every site runs the real loop, rounds, roster and state transfer (cluster.py). Inner steps and the exchange of data only
take time: a round trains for COMPUTE seconds, and its two streams between any two members take EXCHANGE seconds
together. Sites are killed at random times (Poisson), and start again DOWN seconds later.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections import Counter

from simulation.cluster import CHUNK, Cluster, digests_by_round
from simulation.network import Weather
from simulation.virtual_time import run

from pier_node.config.run import RunConfig
from pier_node.rounds.exchange_plan import Row, fitting, rows
from pier_proto.v1.peer_pb2 import Share

COMPUTE, EXCHANGE, DOWN = 60.0, 30.0, 30.0
STEPS = 50
CHUNKS = 4
"""Chunks of a shard."""
HOUR = 3600.0


async def measured(sites: int, rounds: int, mtbf: float, seed: int) -> str:
    """A row of the table.

    Args:
        mtbf: hours between two kills of a site, on average; 0: nobody is killed.
    """
    settings = {
        "run": {"sites": sites},
        "inner": {"total_steps": STEPS * (rounds + 1), "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": STEPS},
    }
    names = [f"{number:04d}" for number in range(sites)]
    # In a grid, a stream brings the shards of a column, one for each row. The first chunk is empty, and the mean of the
    # last one leaves, one level after the other, when all others have gone.
    levels, shards = (2, len(_grid(sites))) if _grid(sites) else (1, 1)
    weather = Weather(delay=0.04, jitter=0.01, chunk=EXCHANGE / (CHUNKS * shards + 2 * levels))
    cluster = Cluster(RunConfig.model_validate(settings), names, seed, weather)
    cluster.length = CHUNK * CHUNKS * sites
    cluster.paces = dict.fromkeys(names, COMPUTE / STEPS)
    for name in names:
        cluster.boot(name)
        cluster.nodes[name].trainer.noise = 0.1
    loop, killed = asyncio.get_running_loop(), Counter[str]()
    await _reach(cluster, 1)
    began, calls, sent = loop.time(), cluster.network.calls.copy(), cluster.network.bytes.copy()
    faults = asyncio.create_task(_kill(cluster, killed, sites / (mtbf * HOUR), seed)) if mtbf else None
    members = [len(await _reach(cluster, number)) for number in range(2, rounds + 2)]
    if faults:
        faults.cancel()
    assert all(len(found) == 1 for found in digests_by_round(cluster).values()), "forked"
    took, calls, sent = loop.time() - began, cluster.network.calls - calls, cluster.network.bytes - sent
    beats, others = calls.pop("Beat"), sum(calls.values())
    attempts = calls["Exchange"] / sum(map(_streams, members))
    bytes_of_rounds = sum(sent.values()) - sent["Beat"]
    cells = [
        f"{sites}",
        f"{killed.total()}",
        f"{60 * rounds / took:.2f}",
        f"{sum(members) / rounds / sites:.1%}",
        f"{attempts:.2f}",
        f"{others / rounds / sites:.0f}",
        f"{bytes_of_rounds / rounds / sites / 1e3:.0f}",
        f"{beats / took / sites:.0f}",
        f"{sent['Beat'] / took / sites / 1e3:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _streams(members: int) -> int:
    """Streams of an attempt: two between each two members of a row or a column."""
    grid = _grid(members)
    sizes = [len(row.nodes) for row in grid] or [members]
    columns = len(grid[0].owners) if grid else 0
    return 2 * (sum(size * (size - 1) for size in sizes) + columns * len(grid) * (len(grid) - 1))


def _grid(members: int) -> list[Row]:
    owners = fitting(members)
    return rows([Share(node=f"{number:04d}", length=int(number < owners)) for number in range(members)])


async def _reach(cluster: Cluster, round: int) -> tuple[str, ...]:
    """The members of a round, once it is committed."""
    while not cluster.committed[round]:
        if cluster.errors:
            raise cluster.errors[0]
        await asyncio.sleep(1.0)
    await asyncio.sleep(COMPUTE / 4)  # the last votes are on their way
    return cluster.furthest(cluster.names).members


async def _kill(cluster: Cluster, killed: Counter[str], rate: float, seed: int) -> None:
    dice, loop = random.Random(f"{seed} kills"), asyncio.get_running_loop()
    while True:
        await asyncio.sleep(dice.expovariate(rate))
        victim = dice.choice([*cluster.nodes])
        killed[victim] += 1
        cluster.crash(victim)
        loop.call_later(DOWN, cluster.boot, victim)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5, help="after the first, which is not measured")
    parser.add_argument("--mtbf", type=float, default=24.0, help="hours between two kills of a site; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| sites | killed | rounds a minute | members | attempts per round | calls | kB | beats a second | kB/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for sites in options.sites:
        began = time.monotonic()
        print(run(measured(sites, options.rounds, options.mtbf, options.seed)), flush=True)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

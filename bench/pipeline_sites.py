"""The sites of bench/pipeline.py: real `pier-node start` in network namespaces with shaped links."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.goodput_sites import Site, hooked, start_commands
from bench.slow_links import star
from pier_node.pipeline.paths_file import PATHS_FILE, Drawn, read_paths
from pier_node.rounds.folder import EVENTS_FILE, read_events

HOOK = Path(__file__).with_name("pipeline_hook")
RATES = (50.0, 25.0, 40.0, 20.0, 30.0, 20.0, 35.0, 25.0, 45.0)
"""Mbit/s of the uplinks."""
NEAR, FAR = 0.005, 0.03
"""Seconds one way, within a region and between the two."""


def regions(source: int, target: int) -> float:
    """Seconds one way: every other site is in the same region."""
    return NEAR if source % 2 == target % 2 else FAR


@dataclass(frozen=True)
class Trial:
    """A pipeline of four stages, and its links.

    Attributes:
        forward: seconds that a forward is paced to take; a backward takes twice as long, a loss a third.
        codec: of activations and of gradients.
        subspace: channels that blocks write to, of 64; 0: all of them.
        batch_size: sequences of 64 tokens in a microbatch; an activation has 64 values a token.
        part: one in so many sequences is really computed: the cores are shared.
        rates: Mbit/s of the uplinks, as many as sites.
        latency: (from, to) -> seconds one way.
    """

    paths: str
    sites: int
    forward: float
    microbatches: int
    codec: tuple[str, str] = ("none", "none")
    subspace: int = 0
    memory: int = 3
    batch_size: int = 48
    part: int = 1
    rates: tuple[float, ...] = RATES
    latency: Callable[[int, int], float] = regions


RUN = """
[run]
sites = {it.sites}
[model]
preset = "llama-tiny"
dim = 64
heads = 2
ffn_dim = 64
layers = 4
context = 64
tie_embeddings = false
subspace = {it.subspace}
[data]
source = "text"
path = "{text}"
[inner]
total_steps = 1_000_000
batch_size = {it.batch_size}
precision = "fp32"
eval_every = 0
[pipeline]
stages = 4
skip = 0.25
paths = "{it.paths}"
microbatches = {it.microbatches}
memory = {it.memory}
activation_codec = "{it.codec[0]}"
gradient_codec = "{it.codec[1]}"
"""
LOOK = 0.5


class Watched:
    """The sites, and what their planners have left so far: the newest paths of each round."""

    def __init__(self, sites: Sequence[Site], folders: Sequence[Path]) -> None:
        self._sites, self._folders = sites, folders
        self.drawn: dict[int, Drawn] = {}

    def steps(self) -> int:
        """That every site has taken."""
        return min(max((int(event["inner_step"]) for event in events), default=0) for events in self.events())

    def events(self) -> list[list[dict[str, Any]]]:
        """A line a committed round, of each site."""
        paths = [folder / EVENTS_FILE for folder in self._folders]
        return [read_events(path.read_bytes()) if path.exists() else [] for path in paths]

    def look(self) -> None:
        """Note paths. Raises RuntimeError: a site has ended."""
        time.sleep(LOOK)
        for folder, site in zip(self._folders, self._sites, strict=True):
            if (folder / PATHS_FILE).exists():
                drawn = read_paths(folder / PATHS_FILE, {})
                self.drawn[drawn.round] = drawn
            if site.ended:
                raise RuntimeError(f"a site has ended:\n{site.tail()}")

    def tails(self) -> str:
        """The ends of what all printed."""
        return "\n\n".join(site.tail() for site in self._sites)


@contextmanager
def running(work: Path, trial: Trial) -> Iterator[Watched]:
    """Sites of a run of their own, started; killed in the end."""
    run = work / "run.toml"
    run.write_text(RUN.format(it=trial, text=argparse.__file__))
    environment = hooked(HOOK, PIER_BENCH_FORWARD=trial.forward, PIER_BENCH_PART=trial.part)
    with ExitStack() as stack:
        spots = stack.enter_context(star(trial.rates[: trial.sites], trial.latency))
        made, folders = [], [work / f"site-{number}" for number in range(trial.sites)]
        commands = start_commands(run, folders, [f"{spot.address}:7700" for spot in spots])
        for spot, folder, start in zip(spots, folders, commands, strict=True):
            command = ["ip", "netns", "exec", spot.namespace, *start]
            made.append(Site(command, folder, environment))
            stack.callback(made[-1].kill)
            made[-1].start()
        yield Watched(made, folders)

"""Host memory of a site, in bytes per parameter, while it trains and takes part in rounds.

`python -m bench.host_memory --against CHECKOUT`: two real sites train a small and a larger model on CPUs, in settings
that differ in what a site has to remember. Several times a second the kernel is asked what each process of the second
site holds, which never serves a state to a newcomer (smaps_rollup; Pss counts a page that processes share once). What a
process needs whatever the model is the same for both models, so the peaks' difference over the difference in parameters
is what a parameter costs:

- daemon: what the daemon holds by itself, and the vectors that it shares with the trainer, whole: shares of two
  processes that are looked at one after the other would not add up while one of them unmaps a vector;
- trainer: what the trainer holds by itself: weights, gradient and moments, and activations;
- files: pages of files that either has mapped, AdamW's moments among them. The kernel takes these back when it needs
  memory.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from bench.goodput_sites import Site, start_commands
from bench.ports import free_port
from bench.tiny_run import Keys, packages, tiny_run
from pier_node.config.run import load
from pier_node.outer.layout import Layout

SETTINGS: dict[str, Keys] = {
    "no codec": {},
    "int4": {"codec": "int4"},
    "overlap": {"overlap": True},
    "int4, 4 fragments, overlap": {"codec": "int4", "fragments": 4, "overlap": True},
}
LAYERS = (6, 24)
"""Of the two models. Both have enough parameters for workers to train on while a state is written."""
BUILD = Path("build")
"""On a disk, where the system's folder for temporary files may be in memory; git does not look there."""
LOOK_SECONDS = 0.05
STEPS = 4


class Held(NamedTuple):
    """Bytes of one site at one time, or their peaks."""

    daemon: float = 0.0
    trainer: float = 0.0
    files: float = 0.0

    def most(self, other: Held) -> Held:
        """The larger of each."""
        return Held(*map(max, self, other))


def held_by(processes: Iterable[psutil.Process]) -> Held:
    """What a site holds now.

    Args:
        processes: of the site, the daemon last, as `Site.family` has them.
    """
    parts = [(it.pid, found) for it in processes if (found := _kilobytes(it.pid, "smaps_rollup"))]
    if not parts:
        return Held()
    daemon, files = _kilobytes(parts[-1][0], "status"), sum(part["Pss_File"] for _, part in parts)
    trainer = sum(part["Pss_Anon"] for _, part in parts[:-1])
    return Held(daemon.get("RssAnon", 0) + daemon.get("RssShmem", 0), trainer, files)


def _kilobytes(pid: int, table: str) -> dict[str, int]:
    """The sizes in a table of a process, in bytes."""
    try:
        text = Path(f"/proc/{pid}/{table}").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return {}
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def peak(checkout: Path, layers: int, setting: str, rounds: int) -> tuple[int, Held]:
    """The number of parameters, and what the second site held at most of each kind. Raises RuntimeError: it failed."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder, ExitStack() as stack:
        run = Path(folder) / "run.toml"
        model: Keys = {"preset": "llama-30m", "layers": layers, "context": 32}
        run.write_text(tiny_run(2, STEPS * rounds, STEPS, {"codec": "none", **SETTINGS[setting]}, model, batch_size=1))
        folders = [Path(folder) / name for name in ("one", "two")]
        path = os.pathsep.join(map(str, packages(checkout)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        sites = list[Site]()
        for command, data in zip(start_commands(run, folders, [f"127.0.0.1:{free_port()}" for _ in folders]), folders):
            sites.append(Site([*command, "--workers", "1"], data, environment))
            stack.callback(sites[-1].kill)
            sites[-1].start()
        held = Held()
        while not sites[1].ended:
            held = held.most(held_by(sites[1].family()))
            time.sleep(LOOK_SECONDS)
        if len(sites[1].commits()) < rounds:
            raise RuntimeError(f"the site has ended before round {rounds}: {sites[1].tail()}")
        return Layout.of_run(load(run)).length, held


def per_parameter(checkout: Path, setting: str, rounds: int) -> Held:
    """Bytes per parameter."""
    (few, small), (many, large) = (peak(checkout, layers, setting, rounds) for layers in LAYERS)
    return Held(*((more - less) / (many - few) for less, more in zip(small, large, strict=True)))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=6, help="of each run")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="a setting; may be repeated")
    options = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    here = Path(__file__).resolve().parent.parent
    codes = {"this": here, **({"the other": options.against.resolve()} if options.against else {})}
    table = Table("setting", "code", "daemon", "trainer", "files", title="host memory, bytes per parameter")
    for setting in options.only or SETTINGS:
        for name, checkout in codes.items():
            held = per_parameter(checkout, setting, options.rounds)
            table.add_row(setting, name, *(f"{size:.1f}" for size in held))
    Console().print(table)


if __name__ == "__main__":
    main()

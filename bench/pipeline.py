"""Is an iteration of a pipeline as long as its planner says?

    python -m bench.pipeline [--quick] [--sites N] [--policy NAME] [--json FILE]        (root; Debian: iproute2)

Real `pier-node start` daemons with four stages, each in a network namespace with an uplink of 20 to 50 Mbit/s, 5 ms
from the sites of its region and 30 ms from the others (star.py). An activation has 0.8 MB. **Compute is paced**: six to
nine sites share two cores here, so a task is done, and then the rest of 0.25 s (forward), 0.5 s (backward) or 0.08 s
(loss) is slept (pipeline_hook/). Links are then about as busy as sites.

What is predicted is the makespan of the plan that was executed, in the planner's simulator, with the times that the
sites had told of before: each planner leaves both in its folder. What is measured is the time from the first site's
start to the end of the last task. What an iteration takes beyond that is not in the planner's problem, and is shown
beside it. The first iterations are left out: nothing is measured before them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.pipeline_figures import Iteration, Result, iterations
from bench.pipeline_sites import Watched, running
from bench.wan_link import has_latency, refuse_without_tools
from pier_node.base.errors import PierError

POLICIES = ("full", "skip", "random")
WARM = 5
"""Iterations that are left out; after five tasks of a kind their times are known."""
COUNT = 6
FORWARD = 0.25
PATIENCE = 600.0
"""Seconds for a policy."""


def measure(policy: str, sites: int, count: int, forward: float = FORWARD, warm: int = WARM) -> Result:
    """Run sites until so many iterations are known. Raises RuntimeError: they are not done in time."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), sites, policy, forward) as watched:
        deadline = time.monotonic() + PATIENCE
        while watched.steps() <= warm + count and time.monotonic() < deadline:
            watched.look()
        found = known(watched)
        if len(found) < count or watched.steps() <= warm + count:
            raise RuntimeError("\n\n".join(["the sites do not come together", watched.tails()]))
    return Result(policy, sites, found[-count:])


def known(watched: Watched) -> list[Iteration]:
    """The iterations so far."""
    from pier_node.pipeline.planning.simulator import makespan

    events = watched.events()
    predicted = {number: makespan(it.problem, it.plan) for number, it in watched.drawn.items()}
    return iterations(events, predicted)


def table(results: list[Result]) -> Table:
    """A row for each policy."""
    caption = f"medians of seconds; compute is paced; load of the machine: {os.getloadavg()[0]:.1f}"
    shown = Table("sites", "paths", title="Iterations, and what the step adds", caption=caption, box=None)
    for name in ("n", "said", "took", "error", "size", "in 10 %", "mean", "norm", "step", "round", "next"):
        shown.add_column(name, justify="right")
    for it in results:
        both = [f"{it.middle(name):.2f}" for name in ("predicted", "measured")]
        errors = [f"{it.middle('error'):+.1%}", f"{it.typical_error:.1%}", f"{it.within:.0%}"]
        times = [f"{it.middle(name):.2f}" for name in ("average", "total", "step", "commit", "between")]
        shown.add_row(str(it.sites), it.policy, str(len(it.iterations)), *both, *errors, *times)
    return shown


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Three iterations each.")
@click.option("--sites", default=6, show_default=True, type=click.IntRange(4, 9), help="How many.")
@click.option("--policy", multiple=True, type=click.Choice(POLICIES), help="Only this one; may be repeated.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def main(quick: bool, sites: int, policy: tuple[str, ...], json_file: Path | None) -> None:
    """Measure, and print the table."""
    console, results = Console(), []
    try:
        refuse_without_tools()
        if not has_latency():
            raise PierError("there is no /dev/net/tun here", "modprobe tun")
        for name in policy or POLICIES:
            with console.status(name):
                results.append(measure(name, sites, 3 if quick else COUNT))
    except (PierError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(table(results))
    if json_file:
        json_file.write_text(json.dumps([it.record() for it in results], indent=1) + "\n")


if __name__ == "__main__":
    main()

"""`pier-node demo`: several sites train one small model, for as many inner steps as fit into the available time."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.commands.model import GenerateOptions, export, generate
from pier_node.config.presets import PRESETS
from pier_node.config.run import InnerSection, ModelSection, RunConfig
from pier_node.demo.picture import Screen, screen_on
from pier_node.demo.record import Record, watching
from pier_node.demo.report import draw, measured, report
from pier_node.demo.sites import MODEL_FOLDER, NAMES, PATIENCE, RESULT_FILE, RUN_FILE, Demo, claimed, cores, threads_for
from pier_node.trainer import devices
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica
from pier_node.wire.transport import Transport

PLOT_FILE = "loss.png"
PROMPT, LENGTH = "def ", 320
TEMPERATURE, TOP_K = 0.7, 20
PRESET = "llama-1m"
BATCH = 4
START_FRACTION = 0.1
FEWEST, MOST = 60, 1000
"""Inner steps of a run that is long enough to be interesting, and of one that need not be longer."""
ROUND_SECONDS = 0.3
"""Seconds of an outer round over loopback, its checkpoint included."""
SLACK = 1.3
"""Factor for validation and everything else that runs on the same cores."""

_RUN = """\
[run]
name = "demo"
sites = {sites}

[model]
preset = "{preset}"

[data]
source = "stdlib"

[inner]
total_steps = {steps}
batch_size = {batch}
lr = 1.5e-3
min_lr = 1.5e-4
warmup_steps = {warmup}
eval_every = {eval_every}
eval_batches = 8

[outer]
algorithm = "{algorithm}"
inner_steps = {inner_steps}
"""


@dataclass(frozen=True)
class Options:
    """The options of `pier-node demo`.

    Attributes:
        steps: inner steps; None: as many as fit into `seconds`.
        keep: continue the run in `folder`, whatever the other options say about it.
    """

    folder: Path
    sites: int
    algorithm: str
    steps: int | None
    seconds: float
    keep: bool
    transport: Transport = "grpc"


def run_demo(options: Options, as_json: bool) -> bool:
    """Run the demo and print the result, as text or as JSON only. Returns whether all went well.

    Raises:
        PierError: it could not be completed.
        KeyboardInterrupt: the user stopped it.
    """
    with claimed(options.folder, options.keep) as work:
        if not (options.keep and (work / RUN_FILE).exists()):
            steps = options.steps or _steps_that_fit(options, Console(stderr=as_json))
            write_run(work / RUN_FILE, options.sites, options.algorithm, steps)
        demo = Demo(work, as_json, options.transport)
        record = Record(demo.config, list(NAMES[: demo.config.run.sites]))
        with screen_on(demo.console) as screen:
            seconds = demo.perform(train(demo, record, screen))
        return _tell(demo, record, seconds)


def write_run(path: Path, sites: int, algorithm: str, steps: int) -> None:
    """Write the demo's run.toml."""
    every = inner_steps(steps)
    rounds = steps if algorithm == "sync" else math.ceil(steps / every)
    often = {"warmup": max(steps // 20, 1), "eval_every": max(rounds // 20, 1), "inner_steps": every}
    path.write_text(_RUN.format(preset=PRESET, batch=BATCH, sites=sites, algorithm=algorithm, steps=steps, **often))


def inner_steps(steps: int) -> int:
    """H: 20, or less in a run so short that it would have fewer than six rounds."""
    return min(max(steps // 6, 5), 20)


@dataclass(frozen=True)
class Pace:
    """The speed of this machine.

    Attributes:
        tokens_per_second: of one site that trains alone.
        abreast: number of sites that keep this speed when all train.
    """

    tokens_per_second: float
    abreast: int


def _steps_that_fit(options: Options, console: Console) -> int:
    with console.status("Measuring how fast this machine is"):
        pace = measure(options.sites)
    steps = steps_within(options.seconds, options.sites, options.algorithm, pace)
    console.print(f"This machine trains on {pace.tokens_per_second:,.0f} tokens/s: {steps} inner steps.")
    return steps


def steps_within(seconds: float, sites: int, algorithm: str, pace: Pace) -> int:
    """Inner steps, in tens, that `sites` sites do in `seconds`: one alone during pier's start, then all in parallel."""
    alone = START_FRACTION if algorithm == "pier" else 0.0
    share = alone + (1 - alone) / min(sites, pace.abreast)
    training = sites * BATCH * PRESETS[PRESET]["context"] * share / pace.tokens_per_second * SLACK
    rounds = ROUND_SECONDS / (1 if algorithm == "sync" else inner_steps(MOST))
    return min(max(int(seconds / (training + rounds)) // 10 * 10, FEWEST), MOST)


def measure(sites: int, seconds: float = 1.5) -> Pace:
    """Train on noise for `seconds`, as each of `sites` sites will train on text, and return the speed."""
    model, device = ModelSection.model_validate({"preset": PRESET}), devices.pick()
    torch.set_num_threads(threads_for(sites))
    config = RunConfig(model=model, inner=InnerSection(batch_size=BATCH))
    replica = Replica(config, device, workers=1)
    replica.load_weights(initial_weights(model, seed=0))
    noise = np.random.default_rng(0).integers(model.vocab_size, size=(BATCH, model.context))
    steps, started = 0, 0.0
    while steps < 2 or time.perf_counter() - started < seconds:
        if steps == 1:  # the first one also allocates
            started = time.perf_counter()
        replica.train(steps, (noise, noise), BATCH).item()
        steps += 1
    speed = (steps - 1) * noise.size / (time.perf_counter() - started)
    return Pace(speed, cores() if device.type == "cpu" else 1)


async def train(demo: Demo, record: Record, screen: Screen) -> float:
    """Train from the start of the first site until all have ended; fill the record and display it.

    Returns the seconds until the last round.

    Raises:
        PierError: sites died and the remaining ones cannot continue, or nothing happened for a long time.
    """
    mourned: set[str] = set()
    async with watching(demo.sites.all, record) as watch:
        screen.tell(f"The run's page: {await demo.start()}")
        async for seconds in demo.ticks(lambda: record.pulse):
            await watch.look()
            screen.show(record, seconds)
            _mourn(demo, record, screen, mourned)
            if record.finished:
                break
        await demo.sites.ended(PATIENCE)
        await watch.look()
    return seconds


def _mourn(demo: Demo, record: Record, screen: Screen, mourned: set[str]) -> None:
    """Report each site that ended too early once, with the end of its log.

    Raises PierError if the others cannot continue.
    """
    lost = [site for site in demo.sites.all if record.tracks[site.name] in record.lost]
    if record.hopeless:
        remedy = "The others cannot go on without it. Mend what its log shows, and start the demo again."
        raise PierError("\n".join(site.obituary for site in lost), remedy)
    for site in lost:
        if site.name not in mourned:
            mourned.add(site.name)
            screen.tell(f"{site.obituary}\nThe other sites go on without it.")


def _tell(demo: Demo, record: Record, seconds: float) -> bool:
    result, model, plot = measured(record, seconds), demo.work / MODEL_FOLDER, demo.work / PLOT_FILE
    with demo.console.status("Exporting the model, and letting it write"):
        text = sample(demo.work / record.newest.name, model)
        draw(record, plot)
    files = {"model": model, "loss curve": plot, "all numbers": demo.work / RESULT_FILE, "sites and logs": demo.work}
    everything = {**asdict(result), "text": text, "export": str(model), "plot": str(plot)}
    demo.finish(everything, report(result, text, files))
    return result.digests_equal and all(site.finished and not site.exit_code for site in result.sites)


def sample(site: Path, model: Path) -> str:
    """Export a site's newest checkpoint to the folder `model`; return a prompt and the model's continuation."""
    torch.set_num_threads(1)  # more would wait for one another: the model is small
    export(site, model, force=True)
    pieces: list[str] = []
    asked = GenerateOptions(
        folder=model,
        model=model,
        prompt=PROMPT,
        tokens=LENGTH,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        seed=0,
        device="cpu",
    )
    generate(asked, pieces.append)
    return "".join(pieces).rstrip()

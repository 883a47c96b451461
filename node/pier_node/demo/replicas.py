"""`pier-node demo`: several sites train one small model, for as many inner steps as fit into the available time.

At the end it reports its numbers, as text for people and as JSON, and draws the losses.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pier_node.base.errors import PierError
from pier_node.base.units import amount, count, percent
from pier_node.commands.model import GenerateOptions, export, generate
from pier_node.config.presets import PRESETS
from pier_node.config.run import InnerSection, ModelSection, RunConfig
from pier_node.demo.picture import WIDTH, Screen, clock, screen_on
from pier_node.demo.record import Curve, Record, Track, watching
from pier_node.demo.sites import MODEL_FOLDER, NAMES, PATIENCE, RESULT_FILE, RUN_FILE, Demo, claimed, cores, threads_for
from pier_node.trainer import devices
from pier_node.trainer.model.evaluate import bits_per_byte
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


SMOOTHING = 0.85
"""Weight of the past in the plotted training losses."""


def draw(record: Record, file: Path) -> None:
    """Write a PNG: each site's training loss and the validation loss over inner steps, and the end of a solo start."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for track in record.tracks.values():
        if track.loss:
            axes.plot(*zip(*smoothed(track.loss)), linewidth=1, alpha=0.6, label=f"training, {track.name}")
    axes.plot(*zip(*record.validation), color="black", marker="o", markersize=3.5, label="validation, the same for all")
    if record.start_steps:
        axes.axvspan(0, record.start_steps, color="grey", alpha=0.15, label="start: one site with everybody's batch")
    config = record.config
    axes.set_title(f"{record.parameters:,} parameters, {config.run.sites} sites, {record.rounds} outer rounds")
    axes.set_xlabel("inner step")
    axes.set_ylabel("loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def smoothed(curve: Curve) -> Curve:
    """Exponential moving average over the points, with bias correction at its start (Kingma and Ba, 2015)."""
    smooth, total, weight = [], 0.0, 0.0
    for step, value in curve:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + 1 - SMOOTHING
        smooth.append((step, total / weight))
    return smooth


@dataclass(frozen=True)
class SiteResult:
    """The result of one site.

    Attributes:
        utilisation: fraction of its training time spent in inner steps rather than in rounds; None: unknown.
        loss: its training loss in nats per byte, sampled from time to time.
    """

    name: str
    finished: bool
    exit_code: int | None
    round: int
    tokens: int
    bytes_sent: int
    utilisation: float | None
    digest: str
    loss: Curve


@dataclass(frozen=True)
class Result:
    """The result of the demo. Losses are in nats per byte.

    Attributes:
        synchronous_bytes: bytes that a site would have sent for as many steps if gradients were averaged at each step.
        saving: the factor by which a site sent less, averaged over sites; None: nothing was sent.
        seconds: from the start of the first site to the last round.
        rounds_compared: number of rounds after which digests of several sites were compared; `digests_equal` has the
            outcome.
        spread: between the sites' models, if each has its own (noloco); None: they share one.
    """

    algorithm: str
    parameters: int
    steps: int
    rounds: int
    inner_steps: int
    initial_loss: float
    final_loss: float
    initial_bits_per_byte: float
    final_bits_per_byte: float
    synchronous_bytes: float
    mean_bytes_sent: float
    saving: float | None
    utilisation: float | None
    seconds: float
    digests_equal: bool
    rounds_compared: int
    spread: float | None
    validation: Curve
    sites: list[SiteResult]


def measured(record: Record, seconds: float) -> Result:
    """The numbers of a finished run."""
    config, curve = record.config, record.validation
    sites = [_site(track, record) for track in record.tracks.values()]
    gradients = record.synchronous_bytes
    sent = sum(site.bytes_sent for site in sites) / len(sites)
    known = [site.utilisation for site in sites if site.utilisation is not None]
    return Result(
        algorithm=config.outer.algorithm,
        parameters=record.parameters,
        steps=config.inner.total_steps,
        rounds=record.rounds,
        inner_steps=1 if config.outer.algorithm == "sync" else config.outer.inner_steps,
        initial_loss=curve[0][1],
        final_loss=curve[-1][1],
        initial_bits_per_byte=bits_per_byte(curve[0][1]),
        final_bits_per_byte=bits_per_byte(curve[-1][1]),
        synchronous_bytes=gradients,
        mean_bytes_sent=sent,
        saving=gradients / sent if sent else None,
        utilisation=sum(known) / len(known) if known else None,
        seconds=seconds,
        digests_equal=not record.forks,
        rounds_compared=record.compared,
        spread=record.spread,
        validation=curve,
        sites=sites,
    )


def _site(track: Track, record: Record) -> SiteResult:
    return SiteResult(
        name=track.name,
        finished=track.round >= record.rounds,
        exit_code=track.code,
        round=track.round,
        tokens=track.event.get("tokens", 0),
        bytes_sent=track.bytes_sent,
        utilisation=track.event.get("utilisation"),
        digest=track.event.get("digest", ""),
        loss=track.loss,
    )


def report(result: Result, text: str, files: dict[str, Path]) -> RenderableType:
    """The complete report.

    Args:
        text: written by the model.
        files: description -> path.
    """
    title = f"[b]Pier[/b]  trained {result.parameters:,} parameters at {len(result.sites)} sites"
    heading, sample = Text("the model continues a prompt:", "dim"), Padding(Text(text, "cyan"), (0, 2))
    body = Group(_summary(result), Text(), _sites(result), Text(), heading, sample, Text(), _files(files))
    return Panel(body, title=title, width=WIDTH, padding=(1, 1), border_style="green")


def _summary(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    bits = f"{result.initial_bits_per_byte:.3f} → {result.final_bits_per_byte:.3f} bits a byte"
    table.add_row("validation loss", f"[b]{result.initial_loss:.3f} → {result.final_loss:.3f}[/b] nats a byte, {bits}")
    table.add_row("sent by a site", _saving(result))
    formula = f"2·4·P·(n−1)/n bytes a step, P = {result.parameters:,}, n = {len(result.sites)}, {result.steps} steps"
    table.add_row("synchronous", f"{amount(result.synchronous_bytes)}: {formula}")
    table.add_row("weights", _agreement(result))
    if result.utilisation is not None:
        table.add_row("utilisation", f"{percent(result.utilisation)} of the time in inner steps, the rest in rounds")
    table.add_row("time", f"{clock(result.seconds)} for {result.steps} inner steps in {result.rounds} rounds")
    return table


def _saving(result: Result) -> str:
    factor = f": [b green]{result.saving:,.1f} times less[/b green] than synchronous training" if result.saving else ""
    return f"[b]{amount(result.mean_bytes_sent)}[/b]{factor}"


def _agreement(result: Result) -> str:
    if not result.digests_equal:
        return "[b red]the sites did NOT hold the same bits: please report this[/b red]"
    if result.spread is not None:
        return f"[green]a model at each site[/green], with a standard deviation of {result.spread:.2e} between them"
    shared = f"after each of the {result.rounds_compared} rounds that they share"
    return f"[green]the same bits at all sites {shared}[/green]"


def _sites(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("site", style="bold")
    for heading in ("rounds", "tokens", "sent", "utilisation"):
        table.add_column(heading, justify="right")
    table.add_column("weights")
    for site in result.sites:
        numbers = count(site.tokens), amount(site.bytes_sent), percent(site.utilisation)
        table.add_row(site.name, f"{max(site.round, 0)}", *numbers, _weights(site))
    return table


def _weights(site: SiteResult) -> str:
    if site.finished:
        return f"{site.digest[:16]}…"
    return f"[red]ended with exit code {site.exit_code} after round {max(site.round, 0)}[/red]"


def _files(files: dict[str, Path]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, path in files.items():
        table.add_row(what, str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
    return table

"""The final report of a demo: its numbers, as text for people, as JSON, and its losses as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pier_node.base.units import amount, count, percent
from pier_node.demo.picture import WIDTH, clock
from pier_node.demo.record import Curve, Record, Track
from pier_node.trainer.model.evaluate import bits_per_byte

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

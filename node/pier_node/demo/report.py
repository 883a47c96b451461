"""The end of a demo: its numbers for people."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pier_node.demo.picture import WIDTH, clock
from pier_node.demo.results import Result, SiteResult
from pier_node.units import amount, count, percent


def report(result: Result, text: str, files: dict[str, Path]) -> RenderableType:
    """Everything.

    Args:
        text: that the model wrote.
        files: what they are -> where they lie.
    """
    title = f"[b]Pier[/b]  trained {result.parameters:,} parameters at {len(result.sites)} sites"
    heading, sample = Text("the model goes on from a prompt:", "dim"), Padding(Text(text, "cyan"), (0, 2))
    body = Group(_summary(result), Text(), _sites(result), Text(), heading, sample, Text(), _files(files))
    return Panel(body, title=title, width=WIDTH, padding=(1, 1), border_style="green")


def _summary(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    bits = f"{result.initial_bits_per_byte:.3f} → {result.final_bits_per_byte:.3f} bits a byte"
    table.add_row("validation loss", f"[b]{result.initial_loss:.3f} → {result.final_loss:.3f}[/b] nats a byte, {bits}")
    table.add_row("sent by a site", _saving(result))
    table.add_row("synchronous", f"{amount(result.synchronous_bytes)}: {_formula(result)}")
    table.add_row("weights", _agreement(result))
    if result.utilisation is not None:
        table.add_row("utilisation", f"{percent(result.utilisation)} of the time in inner steps, the rest in rounds")
    table.add_row("time", f"{clock(result.seconds)} for {result.steps} inner steps in {result.rounds} rounds")
    return table


def _saving(result: Result) -> str:
    factor = f": [b green]{result.saving:,.1f} times less[/b green] than synchronous training" if result.saving else ""
    return f"[b]{amount(result.mean_bytes_sent)}[/b]{factor}"


def _formula(result: Result) -> str:
    sites = len(result.sites)
    return f"2·4·P·(n−1)/n bytes a step, P = {result.parameters:,}, n = {sites}, {result.steps} steps"


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
        row = (
            f"{max(site.round, 0)}",
            count(site.tokens),
            amount(site.bytes_sent),
            percent(site.utilisation),
            _weights(site),
        )
        table.add_row(site.name, *row)
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

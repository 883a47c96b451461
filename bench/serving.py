"""What does a token of an ensemble cost, with all experts and with the likeliest one, with and without a cache of keys
and values?

    python -m bench.serving [--preset llama-30m] [--experts 3] [--tokens 50]

Over HTTP, as a client would ask. Weights are random: what they say does not matter here. For comparison, one such
expert alone computes its whole window for every token, as `pier-node generate` does.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import click
import torch
from aiohttp import web
from rich.console import Console
from rich.table import Table

from pier_node.commands.serve import ServeOptions, open_models
from pier_node.config.run import ModelSection
from pier_node.experts.serving.app import make_app
from pier_node.outer.layout import Layout
from pier_node.rounds.saved_model import exported_weights
from pier_node.trainer.model.decoder import stream
from pier_node.trainer.model.export import export

PROMPT = "x" * 300
AT_ONCE = 4


@dataclass(frozen=True)
class Run:
    """Milliseconds until the prompt of 300 tokens is read, and for a token after it; tokens/s of four requests."""

    prompt: float
    token: float
    together: float


def make(folder: Path, preset: str, experts: int) -> None:
    """An ensemble with random weights."""
    config = ModelSection(preset=preset)
    for number in range(experts):
        generator = torch.Generator().manual_seed(number)
        export(config, torch.randn(Layout.of(config).length, generator=generator) * 0.02, folder / f"e{number}")
    members = [{"domain": f"d{number}", "folder": f"e{number}"} for number in range(experts)]
    (folder / "ensemble.json").write_text(json.dumps({"members": members}))


async def measured(folder: Path, top_k: int, tokens: int) -> Run:
    """Serve it, and ask."""
    asking = open_models(ServeOptions(None, folder, "127.0.0.1:0", top_k, 0.0, "decay", "cpu"))
    runner = web.AppRunner(make_app(asking), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
    async with aiohttp.ClientSession() as session:

        async def seconds(count: int) -> float:
            began = time.perf_counter()
            body = {"prompt": PROMPT, "max_tokens": count, "seed": 1}
            async with session.post(address, json=body, raise_for_status=True) as answer:
                await answer.read()
            return time.perf_counter() - began

        await seconds(1)  # the weights are read
        prompt, all_of_it = await seconds(1), await seconds(tokens)
        began = time.perf_counter()
        await asyncio.gather(*[seconds(tokens) for _ in range(AT_ONCE)])
        together = AT_ONCE * tokens / (time.perf_counter() - began)
    await runner.cleanup()
    asking.close()
    return Run(1e3 * prompt, 1e3 * (all_of_it - prompt) / (tokens - 1), together)


def without_cache(folder: Path) -> float:
    """Milliseconds for a token of one expert that computes its window anew each time."""
    model, count = exported_weights(folder / "e0").model(torch.device("cpu")), 10
    began = time.perf_counter()
    list(stream(model, list(PROMPT.encode()), count))
    return 1e3 * (time.perf_counter() - began) / count


@click.command()
@click.option("--preset", default="llama-30m", show_default=True, help="Size of each expert.")
@click.option("--experts", type=int, default=3, show_default=True, help="Of the ensemble.")
@click.option("--tokens", type=click.IntRange(2), default=50, show_default=True, help="That a request makes.")
def cli(preset: str, experts: int, tokens: int) -> None:
    """Serve an ensemble on this machine, ask it, and print what that took."""
    table = Table("experts", "prompt, ms", "token, ms", f"{AT_ONCE} at once, tokens/s", box=None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder, preset, experts)
        for top_k in (0, 1):
            run = asyncio.run(measured(folder, top_k, tokens))
            table.add_row(
                f"{top_k or experts} of {experts}", f"{run.prompt:.0f}", f"{run.token:.1f}", f"{run.together:.0f}"
            )
        table.add_row("one, nothing kept", "-", f"{without_cache(folder):.0f}", "-")
    Console().print(table)


if __name__ == "__main__":
    cli()

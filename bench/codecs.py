"""How fast are Pier's codecs, and how much do they lose, compared with hivemind's?

    python -m bench.codecs [--quick] [--json FILE]

Speed: GB/s of fp32, one thread of the pool that the exchange uses, on a chunk of 262,144 Gaussian values; the median
of many calls. Error: |x - y| / |x| on Gaussian and on heavy-tailed values (Student's t with 3 degrees of freedom), and
on the pseudo-gradient of a small model. An exception that a codec raises is a result. A speed is left out where
nothing is copied, and where the code was not written to be fast.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.codecs_peers import Peer, peers
from bench.convergence_grid import METHODS, SETTINGS, Setting
from bench.simulation import Trainer
from pier_node.base.shared import Vector
from pier_node.outer.pier import pseudo_gradient
from pier_node.outer.schedule import round_plan
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.initial import initial_weights

LENGTH = 262_144
"""Values in a chunk of the exchange."""
WARMUPS = 3


@dataclass(frozen=True)
class Result:
    """One way to write a chunk; `raises` says why there are no figures. Speeds are GB/s of fp32."""

    system: str
    bits: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    raises: str = ""


def pseudo_gradient_of(setting: Setting, rounds: int, cache: Path) -> Vector:
    """Of a site that trains alone, in the last of some outer rounds: shape [parameters]."""
    config = replace(setting, sites=1).config(METHODS["diloco"], {"lr": 2e-3}, seed=1)
    windows = Windows(open_corpus(config.data, 0, 1, None, cache), config.model.context, 1, "site-0")
    trainer = Trainer(config, [windows], initial_weights(config.model, 1).numpy())
    for number in range(1, rounds + 1):
        anchor = trainer.weights()
        trainer.train(round_plan(config, number))
    delta = np.empty_like(anchor)
    pseudo_gradient(anchor, trainer.weights(), out=delta)
    return delta


def samples(quick: bool) -> dict[str, Vector]:
    """One vector of each kind."""
    rng = np.random.default_rng(1)
    setting, rounds = (SETTINGS["quick"], 2) if quick else (SETTINGS["short"], 12)
    with tempfile.TemporaryDirectory() as cache:
        delta = pseudo_gradient_of(setting, rounds, Path(cache))
    return {
        "normal": rng.standard_normal(LENGTH, np.float32),
        "heavy": rng.standard_t(3, LENGTH).astype(np.float32),
        "pseudo": delta,
    }


def measure(peer: Peer, vectors: dict[str, Vector], reps: int) -> Result:
    """Size, speed and errors, in the thread of the caller."""
    first = next(iter(vectors.values()))
    try:
        message = peer.encode(first)
        bits = 8 * peer.size(message) / len(first)
        errors = {kind: relative_error(values, peer.decode(peer.encode(values))) for kind, values in vectors.items()}
        if not peer.fast:
            return Result(peer.name, bits, errors=errors)
        encode, decode = (speed(work, reps) for work in (lambda: peer.encode(first), lambda: peer.decode(message)))
    except Exception as error:  # whatever another library raises is its result
        return Result(peer.name, raises=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return Result(peer.name, bits, encode * first.nbytes, decode * first.nbytes, errors)


def speed(work: Callable[[], object], reps: int) -> float:
    """Calls in a nanosecond: with the bytes of each, GB/s. Of the median call."""
    times = []
    for _ in range(WARMUPS + reps):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e-9 / statistics.median(times[WARMUPS:])


def relative_error(values: Vector, decoded: Vector) -> float:
    """|x - y| / |x|."""
    return float(np.linalg.norm(values - decoded) / np.linalg.norm(values))


def table(results: list[Result]) -> Table:
    """All codecs, with their compression of fp32."""
    title = f"{LENGTH} fp32 values: GB/s of fp32 in one thread, and |x - y| / |x|"
    reasons = [f"{result.system} raises {result.raises}" for result in results if result.raises]
    shown = Table(title=title, caption="\n".join(reasons), box=SIMPLE, padding=0)
    shown.add_column("codec", no_wrap=True)
    kinds = next(list(result.errors) for result in results if result.errors)
    for heading in ("bits", "less", "encode", "decode", *kinds):
        shown.add_column(heading, justify="right")
    for result in results:
        shown.add_row(result.system, *(["raises"] if result.raises else _cells(result)))
    return shown


def _cells(result: Result) -> list[str]:
    speeds = [f"{each:.2f}" if 0 < each < 100 else "" for each in (result.encode, result.decode)]
    errors = [f"{error:.4f}" for error in result.errors.values()]
    return [f"{result.bits:.4g}", f"{32 / result.bits:.3g}x", *speeds, *errors]


@click.command()
@click.option("--quick", is_flag=True, help="Five calls of each, and a smaller model.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, json_file: Path | None) -> None:
    """Compare ways to write fp32 values in fewer bytes."""
    torch.set_num_threads(1)
    console = Console()
    vectors = samples(quick)
    with ThreadPoolExecutor(1) as pool, console.status("measuring"):
        results = [pool.submit(measure, peer, vectors, 5 if quick else 101).result() for peer in peers()]
    console.print(table(results))
    if json_file:
        figures = {"length": LENGTH, "results": [asdict(result) for result in results]}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli()

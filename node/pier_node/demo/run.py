"""`pier-node demo`, from its options to its report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pier_node.config.run import RunConfig, load
from pier_node.demo.folder import claimed
from pier_node.demo.picture import screen_on
from pier_node.demo.plan import steps_within, threads_for, write_run
from pier_node.demo.record import Record
from pier_node.demo.report import Result, measured, report
from pier_node.demo.sites import NAMES, Sites
from pier_node.demo.train import train
from pier_node.wire.transport import Transport

RUN_FILE, RESULT_FILE, PLOT_FILE, MODEL_FOLDER = "run.toml", "result.json", "loss.png", "model"
PROMPT, LENGTH = "def ", 320
TEMPERATURE, TOP_K = 0.7, 20


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
    console = Console(stderr=as_json)
    with claimed(options.folder, options.keep) as work:
        config = _configured(options, work, console)
        record = Record(config, list(NAMES[: config.run.sites]))
        sites = Sites(work, config.run.sites, threads_for(config.run.sites), options.transport)
        with screen_on(console) as screen:
            seconds = train(sites, work / RUN_FILE, record, screen)
        return _tell(record, seconds, work, console, as_json)


def _configured(options: Options, work: Path, console: Console) -> RunConfig:
    path, steps = work / RUN_FILE, options.steps
    if options.keep and path.exists():
        return load(path)
    if steps is None:
        from pier_node.demo.plan import measure

        with console.status("Measuring how fast this machine is"):
            pace = measure(options.sites)
        steps = steps_within(options.seconds, options.sites, options.algorithm, pace)
        console.print(f"This machine trains on {pace.tokens_per_second:,.0f} tokens/s: {steps} inner steps.")
    return write_run(path, options.sites, options.algorithm, steps)


def _tell(record: Record, seconds: float, work: Path, console: Console, as_json: bool) -> bool:
    import torch

    from pier_node.commands.export import export
    from pier_node.demo.report import draw

    torch.set_num_threads(1)  # more would wait for one another: the model is small
    result, model = measured(record, seconds), work / MODEL_FOLDER
    with console.status("Exporting the model, and letting it write"):
        export(work / record.newest.name, model, force=True)
        text = sample(model)
        draw(record, work / PLOT_FILE)
    everything = {**result.as_json(), "text": text, "export": str(model), "plot": str(work / PLOT_FILE)}
    (work / RESULT_FILE).write_text(json.dumps(everything, indent=1) + "\n")
    files = {"model": model, "loss curve": work / PLOT_FILE, "all numbers": work / RESULT_FILE, "sites and logs": work}
    if as_json:
        print(json.dumps(everything))
    else:
        console.print(report(result, text, files))
    return _went_well(result)


def sample(model: Path) -> str:
    """The prompt and its continuation by the exported model."""
    from pier_node.commands.generate import generate

    pieces: list[str] = []
    generate(model, model, PROMPT, LENGTH, TEMPERATURE, TOP_K, seed=0, device="cpu", show=pieces.append)
    return "".join(pieces).rstrip()


def _went_well(result: Result) -> bool:
    return result.digests_equal is not False and all(site.finished and not site.exit_code for site in result.sites)

"""`pier-node demo --pipeline`: six sites, each with one of four stages of a model, and paths that skip one of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from pier_node.base.errors import PierError
from pier_node.base.units import several
from pier_node.config.run import RunConfig, load
from pier_node.demo.folder import claimed
from pier_node.demo.picture import CHART_HEIGHT, CHART_WIDTH, WIDTH, bars, clock
from pier_node.demo.plan import threads_for
from pier_node.demo.record import Curve, Record
from pier_node.demo.run import MODEL_FOLDER, RESULT_FILE, RUN_FILE, sample
from pier_node.demo.sites import NAMES, Site, Sites
from pier_node.demo.train import TICK, Watch, interruptible
from pier_node.outer.schedule import total_rounds
from pier_node.pipeline.paths_file import PATHS_FILE, Drawn, read_paths

SITES, STAGES, SKIP = 6, 4, 0.25
STEPS = 60
APART = 5
"""Steps between two outer rounds, if there are any."""
LINE_SECONDS = 5.0
STILL = 240.0
"""Seconds without a step after which the demo gives up. The first step waits until the planner is compiled."""

_RUN = """\
[run]
name = "pipeline-demo"
sites = {sites}

[model]
preset = "llama-1m"

[inner]
total_steps = {steps}
batch_size = 4
lr = 3e-3
min_lr = 3e-4
warmup_steps = {warmup}
precision = "fp32"
eval_batches = 8

[pipeline]
stages = {stages}
paths = "{paths}"
skip = {skip}
microbatches = 6

[outer]
algorithm = "{algorithm}"
inner_steps = {apart}
"""


@dataclass(frozen=True)
class PipelineOptions:
    """The options of `pier-node demo --pipeline`.

    Attributes:
        kill_at: step after which one site gets SIGKILL; None: none does.
        algorithm: of [outer].
    """

    folder: Path
    steps: int | None
    kill_at: int | None
    paths: str = "skip"
    algorithm: str = "sync"


@dataclass(frozen=True)
class PipelineResult:
    """The result. Losses are in nats per byte, on the validation split and on each step's microbatches.

    Attributes:
        empty_rounds: attempts that did not count because they lost a site.
        killed: name of the killed site; "": none.
    """

    steps: int
    empty_rounds: int
    killed: str
    initial_loss: float
    final_loss: float
    training: Curve
    seconds: float
    failed: list[str]


def run_pipeline_demo(options: PipelineOptions, as_json: bool) -> bool:
    """Run the demo and print the result. Returns whether all went well.

    Raises:
        PierError: it could not be completed.
        KeyboardInterrupt: the user stopped it.
    """
    console = Console(stderr=as_json)
    with claimed(options.folder, keep=False) as work:
        config = _write_run(work / RUN_FILE, options)
        sites = Sites(work, SITES, threads_for(SITES))
        watched = _Watched(sites, work, config, options.kill_at, console)
        seconds = asyncio.run(interruptible(sites, watched.run()))
        if seconds is None:
            raise KeyboardInterrupt
        return _tell(watched, seconds, work, console, as_json)


def _write_run(path: Path, options: PipelineOptions) -> RunConfig:
    steps = options.steps or STEPS
    numbers = {"sites": SITES, "steps": steps, "warmup": max(steps // 10, 1), "stages": STAGES, "skip": SKIP}
    path.write_text(_RUN.format(paths=options.paths, algorithm=options.algorithm, apart=APART, **numbers))
    return load(path)


class _Watched:
    """The sites of the demo while they train."""

    def __init__(self, sites: Sites, work: Path, config: RunConfig, kill_at: int | None, console: Console) -> None:
        self.sites, self.work, self.config, self._console = sites, work, config, console
        self.record = Record(config, [*NAMES[:SITES]])
        self.curve: Curve = []
        self.killed = ""
        self._kill_at, self._drawn, self._said = kill_at, "", 0.0
        self._news_at = 0.0
        self._charts: list[asyncio.Task[None]] = []

    async def run(self) -> float:
        """Run until all live sites are done. Returns the seconds until the last step. Raises PierError."""
        time = asyncio.get_running_loop().time
        began = self._news_at = time()
        seconds = 0.0
        async with Watch(self.sites.all, self.record) as watch:
            page = await self.sites.start(self.work / RUN_FILE)
            self._console.print(f"The run's page: {page}", highlight=False)
            while any(site.running for site in self.sites.all):
                await asyncio.sleep(TICK)
                await watch.look()
                if self._learn():
                    self._news_at, seconds = time(), time() - began
                self._show(time() - began)
                self._kill()
                self._require_news(time())
        await asyncio.gather(*self._charts)
        return seconds

    @property
    def step(self) -> int:
        """The step of the site that is furthest ahead."""
        return max((track.event.get("inner_step", 0) for track in self.record.tracks.values()), default=0)

    def drawn(self) -> Drawn | None:
        """The latest paths that a planner has written."""
        found = [site.folder / PATHS_FILE for site in self.sites.all if (site.folder / PATHS_FILE).exists()]
        newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
        return read_paths(newest, self._names()) if newest else None

    def _names(self) -> dict[str, str]:
        return {track.status["node"]: track.name for track in self.record.tracks.values() if track.status}

    def _learn(self) -> bool:
        """Record a new step. Returns whether there was one."""
        for track in self.record.tracks.values():
            step, loss = track.event.get("inner_step", 0), track.event.get("loss")
            if loss is not None and step > (self.curve[-1][0] if self.curve else 0):
                self.curve.append((step, loss))
                return True
        return False

    def _show(self, seconds: float) -> None:
        drawn = self.drawn() if len(self._names()) == SITES else None
        if drawn and drawn.key != self._drawn:
            self._drawn = drawn.key
            self._charts.append(asyncio.create_task(self._chart(drawn)))
        if self.curve and seconds - self._said >= LINE_SECONDS:
            self._said = seconds
            step, loss = self.curve[-1]
            alive = several(sum(site.running for site in self.sites.all), "site")
            line = f"[{clock(seconds)}] step {step}/{self.config.inner.total_steps}  loss {loss:.3f}  {alive}"
            self._console.print(line, highlight=False, markup=False)

    async def _chart(self, drawn: Drawn) -> None:
        """In a thread, because the simulator is compiled on first use."""
        chart = await asyncio.to_thread(drawn.chart, min(self._console.width, WIDTH))
        self._console.print(Text(f"\nThe paths of an iteration, {drawn.title}:", "bold"), chart, "", sep="\n")

    def _kill(self) -> None:
        """Send SIGKILL to a site that has a replica and is not the planner."""
        if self._kill_at is None or self.killed or self.step < self._kill_at:
            return
        drawn = self.drawn()
        if drawn is None:
            return
        name, stage = drawn.victim()
        self.killed = name
        next(site for site in self.sites.all if site.name == name).kill()
        said = f"Killed {name}, which held stage {stage}, after step {self.step}: the others plan anew without it."
        self._console.print(said, style="bold red", highlight=False)

    def _require_news(self, now: float) -> None:
        for site in self.sites.all:
            if not site.running and site.code and site.name != self.killed:
                raise PierError(site.obituary)
        if now - self._news_at > STILL:
            tails = "\n".join(f"{site.name}: {_last_line(site)}" for site in self.sites.all)
            raise PierError(f"no step for {STILL:.0f} s:\n{tails}", f"The logs are in {self.work}.")


def _last_line(site: Site) -> str:
    return site.tail().rpartition("\n")[2]


def _tell(watched: _Watched, seconds: float, work: Path, console: Console, as_json: bool) -> bool:
    import torch

    from pier_node.commands.export import export

    torch.set_num_threads(1)
    holder = next((it.folder for it in watched.sites.all if (it.folder / "checkpoints").exists()), None)
    if holder is None:
        raise PierError("no site has joined the stages", f"The logs are in {work}.")
    model = work / MODEL_FOLDER
    export(holder, model, force=True)
    result, text = _result(watched, holder, seconds), sample(model)
    everything = {**asdict(result), "text": text, "export": str(model)}
    (work / RESULT_FILE).write_text(json.dumps(everything, indent=1) + "\n")
    if as_json:
        print(json.dumps(everything))
    else:
        console.print(_report(result, text, model))
    return not result.failed and result.final_loss < result.initial_loss


def _result(watched: _Watched, holder: Path, seconds: float) -> PipelineResult:
    before, after = _validation(watched.config, holder)
    rounds = max(track.round for track in watched.record.tracks.values())
    failed = [site.name for site in watched.sites.all if site.code and site.name != watched.killed]
    steps = watched.step
    again = rounds - total_rounds(watched.config)
    return PipelineResult(steps, again, watched.killed, before, after, watched.curve, seconds, failed)


def _validation(config: RunConfig, holder: Path) -> tuple[float, float]:
    """Loss of the whole model with all stages: the initial one and the current one."""
    from pier_node.commands.evaluate import measure, validation_windows
    from pier_node.rounds.weights import newest_weights
    from pier_node.trainer.model.initial import initial_weights

    now = newest_weights(holder)
    windows = validation_windows(config, now, holder, None, 0)
    first = replace(now, flat=initial_weights(config.model, config.run.seed))
    before, after = (measure(config, weights, windows, "cpu").loss for weights in (first, now))
    return before, after


def _report(result: PipelineResult, text: str, model: Path) -> Group:
    again = several(result.empty_rounds, "attempt")
    lost = f"; {result.killed} was killed, and {again} had to be made again" if result.killed else ""
    lines = [
        Text(f"\n{result.steps} steps in {clock(result.seconds)}{lost}", "bold"),
        Text(f"validation loss of the joined model  {result.initial_loss:.3f} → {result.final_loss:.3f} nats a byte"),
        *(Text(row, "cyan") for row in bars(result.training, result.steps, CHART_WIDTH, CHART_HEIGHT)),
        Text(f"training loss, step 0 to {result.steps}", "dim"),
    ]
    wrote = Padding(Text(text, "cyan"), (0, 2))
    return Group(*lines, Text("\nthe model goes on from a prompt:", "dim"), wrote, Text(f"\nmodel  {model}"))

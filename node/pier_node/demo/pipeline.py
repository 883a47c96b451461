"""`pier-node demo --pipeline`: six sites, each with one of four stages of a model, and paths that skip one of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from pier_node.base.errors import PierError
from pier_node.base.units import several
from pier_node.commands.model import measure, validation_windows
from pier_node.config.run import RunConfig
from pier_node.demo.picture import CHART_HEIGHT, CHART_WIDTH, LINE_SECONDS, bars, clock
from pier_node.demo.record import Curve, Record, watching
from pier_node.demo.replicas import sample
from pier_node.demo.sites import MODEL_FOLDER, RUN_FILE, Demo, claimed
from pier_node.outer.schedule import total_rounds
from pier_node.pipeline.paths_file import PATHS_FILE, Drawn, read_paths
from pier_node.rounds.saved_model import newest_weights
from pier_node.trainer.model.initial import initial_weights

SITES, STAGES, SKIP = 6, 4, 0.25
STEPS = 60
APART = 5
"""Steps between two outer rounds, if there are any."""

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
paths = "skip"
skip = {skip}
microbatches = 6
activation_codec = "int8"
gradient_codec = "int8"

[outer]
algorithm = "{algorithm}"
inner_steps = {apart}
"""


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


def run_pipeline_demo(folder: Path, steps: int | None, kill_at: int | None, algorithm: str, as_json: bool) -> bool:
    """Run the demo and print the result. Returns whether all went well.

    Args:
        kill_at: step after which one site gets SIGKILL; None: none does.
        algorithm: of [outer].

    Raises:
        PierError: it could not be completed.
        KeyboardInterrupt: the user stopped it.
    """
    with claimed(folder) as work:
        write_run(work / RUN_FILE, steps or STEPS, algorithm)
        demo = Demo(work, as_json)
        training = _Training(demo, kill_at)
        return _tell(training, demo.perform(training.run()))


def write_run(path: Path, steps: int, algorithm: str) -> None:
    """Write the demo's run.toml."""
    numbers = {"sites": SITES, "steps": steps, "warmup": max(steps // 10, 1), "stages": STAGES, "skip": SKIP}
    path.write_text(_RUN.format(algorithm=algorithm, apart=APART, **numbers))


class _Training:
    """The sites of the demo while they train."""

    def __init__(self, demo: Demo, kill_at: int | None) -> None:
        self.demo = demo
        self.record = Record(demo.config, [site.name for site in demo.sites.all])
        self.curve: Curve = []
        self.killed = ""
        self._kill_at, self._drawn, self._next_line = kill_at, "", 0.0

    async def run(self) -> float:
        """Run until all live sites are done. Returns the seconds until the last step. Raises PierError."""
        until = 0.0
        async with watching(self.demo.sites.all, self.record) as watch:
            self.demo.console.print(f"The run's page: {await self.demo.start()}", highlight=False)
            async for seconds in self.demo.ticks(lambda: self.step):
                await watch.look()
                if self._learn():
                    until = seconds
                self._show(seconds)
                self._kill()
                for site in self.demo.sites.all:
                    if site.code and site.name != self.killed:
                        raise PierError(site.obituary)
                if not any(site.running for site in self.demo.sites.all):
                    break
        return until

    @property
    def step(self) -> int:
        """The step of the site that is furthest ahead."""
        return max((track.event.get("inner_step", 0) for track in self.record.tracks.values()), default=0)

    def _learn(self) -> bool:
        """Record the loss of a new step. Returns whether there was one."""
        for track in self.record.tracks.values():
            step, loss = track.event.get("inner_step", 0), track.event.get("loss")
            if loss is not None and step > (self.curve[-1][0] if self.curve else 0):
                self.curve.append((step, loss))
                return True
        return False

    def _show(self, seconds: float) -> None:
        drawn = self._paths()
        if drawn and drawn.key != self._drawn:
            self._drawn = drawn.key
            drawn_on = f"The paths of an iteration, {drawn.problem.title}, are drawn on the run's page."
            self.demo.console.print(Text(drawn_on))
        if self.curve and seconds >= self._next_line:
            self._next_line = seconds + LINE_SECONDS
            step, loss = self.curve[-1]
            alive = several(sum(site.running for site in self.demo.sites.all), "site")
            line = f"[{clock(seconds)}] step {step}/{self.demo.config.inner.total_steps}  loss {loss:.3f}  {alive}"
            self.demo.console.print(line, highlight=False, markup=False)

    def _paths(self) -> Drawn | None:
        """The latest paths that a planner has written, once the names of all sites are known."""
        names = {track.status["node"]: track.name for track in self.record.tracks.values() if track.status}
        found = [path for site in self.demo.sites.all if (path := site.folder / PATHS_FILE).exists()]
        if not found or len(names) < SITES:
            return None
        return read_paths(max(found, key=lambda path: path.stat().st_mtime_ns), names)

    def _kill(self) -> None:
        """Send SIGKILL to a site that has a replica and is not the planner."""
        if self._kill_at is None or self.killed or self.step < self._kill_at or not (drawn := self._paths()):
            return
        self.killed, stage = drawn.victim()
        next(site for site in self.demo.sites.all if site.name == self.killed).kill()
        said = (
            f"Killed {self.killed}, which held stage {stage}, after step {self.step}: the others plan again without it."
        )
        self.demo.console.print(said, style="bold red", highlight=False)


def _tell(training: _Training, seconds: float) -> bool:
    demo = training.demo
    holder = next((site.folder for site in demo.sites.all if (site.folder / "checkpoints").exists()), None)
    if holder is None:
        raise PierError("no site has joined the stages", f"The logs are in {demo.work}.")
    model = demo.work / MODEL_FOLDER
    text = sample(holder, model)
    before, after = _validation(demo.config, holder)
    result = PipelineResult(
        steps=training.step,
        empty_rounds=max(track.round for track in training.record.tracks.values()) - total_rounds(demo.config),
        killed=training.killed,
        initial_loss=before,
        final_loss=after,
        training=training.curve,
        seconds=seconds,
        failed=[site.name for site in demo.sites.all if site.code and site.name != training.killed],
    )
    demo.finish({**asdict(result), "text": text, "export": str(model)}, _report(result, text, model))
    return not result.failed and result.final_loss < result.initial_loss


def _validation(config: RunConfig, holder: Path) -> tuple[float, float]:
    """Loss of the whole model with all stages: the initial one and the current one."""
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
    return Group(*lines, Text("\nthe model continues from a prompt:", "dim"), wrote, Text(f"\nmodel  {model}"))

"""`pier-node init`: writes a run.toml to begin with, and chooses how sites exchange updates: where the least is lost.

From docs/results.md, "Convergence": plain DiLoCo (arXiv 2311.08105) after a solo start stays nearest to synchronous
training, with a lower momentum and a higher learning rate than its paper has. Pier's schedule, published with two
thousand rounds (arXiv 2511.17849), loses much more with a hundred, and gained nothing with two thousand.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier_node.base.errors import PierError
from pier_node.base.toml import write_new
from pier_node.base.units import age, percent, seconds
from pier_node.config.commented import run_toml
from pier_node.config.presets import RECIPES, RUN_TOML, TOKENIZER
from pier_node.config.run import InnerSection, ModelSection, OuterSection, PipelineSection, RunConfig
from pier_node.outer.layout import Layout

LEAST_LOSS: dict[str, Any] = {"algorithm": "diloco", "start": "solo", "momentum": 0.8, "lr": 0.8}
MUON: dict[str, Any] = {"momentum": 0.6, "lr": 0.9, "schedule": "anneal"}
"""In place of these, with Muon inside and few rounds."""
WHY = "Chosen: DiLoCo with a {} start and these momentum and lr had the lowest loss (docs/results.md, Convergence)."
MANY = 1000
"""Outer rounds from which a run anneals and starts briefly: 2,000 gained by it, 100 did not, and nothing between was
measured."""
SHORT_START, WARMUPS = 0.02, 2
"""Of a long run: the part that a solo start takes, or so many times its warmup if that is more."""
LONG_WHY = (
    " Over so many rounds, the loss is lower if momentum and both learning rates are annealed at the end, and a short "
    "start is enough."
)
SYNC_WHY = (
    " Over this link, a synchronous start takes at most half of the time of a solo one, in which the other sites wait, "
    "and its loss was the same, within the spread of seeds."
)


RTT = 100.0
"""Milliseconds of a round trip between sites of which nothing else is said: across a continent, or an ocean."""


@dataclass(frozen=True)
class Pace:
    """How fast the slowest site is.

    Attributes:
        mbit: of its link to the others, in Mbit/s.
        step: seconds of an inner step.
        rtt: longest round trip from one site to another, in milliseconds.
    """

    mbit: float
    step: float
    rtt: float = RTT


@dataclass(frozen=True)
class Way:
    """How updates travel.

    Attributes:
        keys: of [outer].
        loss: above tuned synchronous training, as measured with four sites and a hundred rounds.
        late: the same if a result takes longer than half of the next inner steps.
    """

    words: str
    keys: dict[str, Any]
    loss: str
    late: str


WAYS = (
    Way("as they are (fp32)", {}, "+0.0 %", "+0.0 %"),
    Way("int4", {"codec": "int4"}, "+0.3 %", "+0.3 %"),
    Way("int4, while sites train", {"codec": "int4", "overlap": True, "fragments": 5}, "+0.3 %", "+1.3 %"),
)
"""From the simplest to the least waiting; docs/results.md, "Convergence"."""
FEW = 4
"""Sites with which this was measured; 16 lost 2 % more."""
ENOUGH = 0.9
"""Part of its time that a site should spend in inner steps."""


MUCH_FASTER = 0.5
"""A synchronous start is chosen if it takes this part of the time of a solo one, or less: it needs all sites at every
step, and 24 bytes of memory a parameter more, and its loss is the same (docs/results.md, Convergence)."""

ROUND = 0.1
"""Seconds that a round takes besides, with a tiny model: the votes of the sites, and what is on their disks before.
Measured with two sites on one busy machine (two cores, load 10): 200 synchronous steps of 5 ms took 89 ms each."""


def start_of(run: RunConfig, pace: Pace, exchange: float) -> tuple[str, float]:
    """How the run should start, and how many inner steps a step of the start takes as long as.

    A solo start has the batch of all sites at one of them. In a synchronous one, sites exchange the gradient at each
    step, and every daemon takes the step, for which the seconds are measured here. It was tried with AdamW, and with
    gradients that travel as they are.

    Args:
        exchange: seconds for the whole model.
    """
    from pier_node.doctor.machine import SAMPLE, measured

    sites, parameters = run.run.sites, Layout.of(run.model).length
    most = MUCH_FASTER * sites * pace.step
    together = pace.step + exchange + ROUND
    if run.outer.codec == "none" and run.inner.optimizer == "adamw" and together <= most:
        length = min(SAMPLE, parameters)
        synchronous = run.model_copy(update={"outer": OuterSection(algorithm="sync")})
        together += measured(synchronous, length) * parameters / length
        if together <= most:
            return "sync", together / pace.step
    return "solo", sites


def way(config: RunConfig, pace: Pace) -> tuple[Way, str, str]:
    """The first of WAYS in which sites do not wait too long for each other, or the last; its start; a table of all.

    Args:
        config: the run, whose updates travel as they are.
    """
    from pier_node.rounds.prediction import Line, exchange_seconds, share_of_compute

    parameters, inner, outer = Layout.of(config.model).length, config.inner, config.outer
    line = Line(pace.mbit * 125_000, pace.rtt / 1000)
    rows = [f"  {'updates travel':24}{'exchange':>10}{'training':>10}{'whole run':>12}{'loss':>9}"]
    found = []
    for each in WAYS:
        run = config.model_copy(update={"outer": outer.model_copy(update=each.keys)})
        exchange = exchange_seconds(run, parameters, config.run.sites, line)
        share = share_of_compute(run, outer.inner_steps * pace.step, exchange)
        part, (start, cost) = outer.start_fraction, start_of(run, pace, exchange)
        whole = inner.total_steps * pace.step * (part * cost + (1 - part) / share)
        loss = each.late if exchange > outer.inner_steps * pace.step / 2 else each.loss
        row = f"  {each.words:24}{seconds(exchange):>10}{percent(share):>10}{age(whole):>12}{loss:>9}"
        rows.append(row)
        found.append((each, start, share))
    best, start, _ = next((it for it in found if it[2] >= ENOUGH), found[-1])
    return best, start, "\n".join(rows)


FAMILY = {"llama": "Llama 2 (32,000 tokens)", "gpt2": "GPT-2 (50,257 tokens)"}
"""Whose vocabulary a preset has, by the first word of its name."""
GENTLE = {"lr": 2e-5, "min_lr": 2e-6}
"""Learning rates that keep what a pretrained model knows: TRL's default for supervised fine-tuning, and a tenth."""
LONGEST = 1024
"""Tokens of a sequence, at most, in the run.toml of a model that was trained on longer ones."""


@dataclass(frozen=True)
class Wanted:
    """What is known of a run.

    Attributes:
        preset: of the model; "": the default.
        weights: a folder with a model in Hugging Face's format, in place of the preset.
        steps: inner steps of the whole run; 0: as usual for the preset.
        stages: of a pipeline; 0: every site trains the whole model.
        optimizer: of inner steps; "": the default.
        run: keys of [run].
        pace: None: not known.
    """

    preset: str = ""
    weights: Path | None = None
    steps: int = 0
    stages: int = 0
    optimizer: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace | None = None


def init(path: Path, wanted: Wanted, force: bool) -> str:
    """Write the file; returns a message for the user.

    Raises:
        PierError: it exists (without `force`), or cannot be written; or what is wanted does not go together.
    """
    how = "  pier-node start" + ("" if path == RUN_TOML else f" --run {shlex.quote(str(path))}")
    tables = recipe("" if wanted.weights else wanted.preset, wanted.steps)
    tables["run"], told = {**wanted.run}, ""
    if wanted.weights is None:
        tables["model"] = {"preset": wanted.preset} if wanted.preset else {}
    else:
        for section, keys in _tables_of(wanted.weights).items():
            tables[section] = {**tables.get(section, {}), **keys}
        tables["run"]["pretrained"] = True
        how += f" --from {shlex.quote(str(wanted.weights))}"
        told = f"Its learning rate is {GENTLE['lr']:g}, as usual where a pretrained model learns more: [inner] lr.\n"
    if wanted.optimizer:
        tables["inner"]["optimizer"] = wanted.optimizer
    _name_tokenizer(tables)
    why, predicted = (_into_stages if wanted.stages else _into_replicas)(tables, wanted)
    write_new(path, run_toml(tables, why), force)
    return (
        f"Wrote {path}: every setting of a run, with its meaning.\n{told}{predicted}"
        f"{missing_tokenizer(RunConfig.model_validate(tables), 'repeat this command with --force')}"
        f"{_how_many(tables['run'].get('sites', 0))}\n\n{how}\n"
    )


def _into_replicas(tables: dict[str, dict[str, Any]], wanted: Wanted) -> tuple[str, str]:
    """Choose how replicas exchange updates; returns why, and what is predicted."""
    tables["outer"], first, why, told = {**LEAST_LOSS}, "solo", "", ""
    inner, sites = tables["inner"], tables["run"].get("sites", 0)
    muon = wanted.optimizer == "muon"
    if inner["total_steps"] >= MANY * OuterSection().inner_steps:
        warmup = inner.get("warmup_steps", InnerSection().warmup_steps)
        part = min(max(SHORT_START, WARMUPS * warmup / inner["total_steps"]), OuterSection().start_fraction)
        tables["outer"] |= {"schedule": "anneal", "start_fraction": round(part, 3)}
        why += LONG_WHY
        inner["min_lr"] = inner.get("lr", InnerSection().lr) / 100
    elif muon:
        tables["outer"] |= MUON
    if pace := wanted.pace:
        if sites < 2:
            raise PierError("--pace is for an exchange between two sites or more", "Give --sites, too.")
        best, start, table = way(RunConfig.model_validate(tables), pace)
        tables["outer"] |= {**best.keys, "start": start}
        why += f" Updates travel {best.words}: chosen for {pace.mbit:g} Mbit/s and {pace.step:g} s an inner step."
        told += (
            f"\nWith {pace.mbit:g} Mbit/s, {pace.step:g} s an inner step and {pace.rtt:g} ms a round trip, predicted:"
        )
        told += f"\n\n{table}\n\n"
        told += f"Chosen: {best.words}. Loss: above synchronous training, as measured with {FEW} sites and 100 rounds."
        told += " With 16 sites it was 2 % higher." if sites > FEW else ""
        told += " With Muon it was about 4 % lower.\n\n" if muon else "\n\n"
        if start == "sync":
            first, why = "synchronous", why + SYNC_WHY
            told += f"{SYNC_WHY.strip()}\n\n"
    return WHY.format(first) + why, told


def _into_stages(tables: dict[str, dict[str, Any]], wanted: Wanted) -> tuple[str, str]:
    """Choose a pipeline whose step has as many sequences as one of replicas; returns why, and what it is.

    At least twice as many microbatches as stages keep all stages busy.
    """
    stages, sites = wanted.stages, tables["run"].setdefault("sites", wanted.stages)
    layers = ModelSection.model_validate(tables["model"]).layers
    if wanted.pace:
        raise PierError("--pace is for sites that train the whole model", "Leave out --stages, or --pace.")
    if stages > sites:
        raise PierError(f"--stages {stages} is more than there are sites: {sites}", "Every stage needs a site.")
    if stages > layers:
        raise PierError(f"--stages {stages} is more than the model's {layers} blocks", "Take fewer, or a larger model.")
    inner = tables["inner"]
    sequences = sites * inner.get("batch_size", InnerSection().batch_size)
    size = inner.pop("micro_batch", 0) or max(1, sequences // max(2 * stages, PipelineSection().microbatches))
    inner["batch_size"], microbatches = size, max(1, sequences // size)
    codecs = {"activation_codec": "int8", "gradient_codec": "int8"}
    tables["pipeline"] = {"stages": stages, "paths": "full", "microbatches": microbatches, **codecs}
    tables["outer"] = {"algorithm": "sync"}
    told = (
        f"In a step, {microbatches} microbatches of {size} sequences visit all {stages} stages, in int8 between them.\n"
    )
    return "Chosen: sites of the same stage average their gradients at every step, and stay equal.", told


def _tables_of(weights: Path) -> dict[str, dict[str, Any]]:
    from pier_node.trainer.model.cost import CHUNK
    from pier_node.trainer.model.hub import read_config

    tokenizer = weights / "tokenizer.json"
    model = read_config(weights)
    if model.form != "gpt2":  # rotary positions: a run may train on shorter sequences than the model can read
        model = model.model_copy(update={"context": min(model.context, LONGEST)})
    tables: dict[str, dict[str, Any]] = {"model": model.model_dump(exclude_none=True), "inner": {**GENTLE}}
    if tokenizer.exists():
        tables["data"] = {"tokenizer": str(tokenizer.absolute())}
    if model.transformers and model.context * model.vocab_size > CHUNK:  # it has no loss in chunks
        tables["inner"]["micro_batch"] = 1
    return tables


def _name_tokenizer(tables: dict[str, dict[str, Any]]) -> None:
    """Say which file the tokenizer is, if it is here: then a site that joins gets it from the others."""
    from pier_node.trainer.data.tokens import open_tokenizer

    name = tables.get("data", {}).get("tokenizer", "bytes")
    if name != "bytes" and Path(name).exists():
        tables["data"]["tokenizer_hash"] = open_tokenizer(name).fingerprint


def _how_many(sites: int) -> str:
    if not sites:
        return (
            "Say in it how many sites there are ([run] sites), then start the first one, which prints how others join:"
        )
    many = "one site" if sites == 1 else f"{sites} sites"
    return f"It is for {many}. Start the first one, which prints how others join:"


def recipe(preset: str, steps: int = 0) -> dict[str, dict[str, Any]]:
    """The tables of run.toml in which a preset's size is trained as usual, in `steps` inner steps (0: as usual)."""
    tables = {section: {**keys} for section, keys in RECIPES.get(preset, {}).items()}
    inner = tables.setdefault("inner", {"total_steps": InnerSection().total_steps})
    if steps:
        inner["total_steps"] = steps
        inner["warmup_steps"] = min(inner.get("warmup_steps", InnerSection().warmup_steps), steps // 10)
    return tables


def missing_tokenizer(config: RunConfig, again: str) -> str:
    """What to do about the tokenizer of a preset's recipe; "": nothing. `again`: what to do once the file is here."""
    if config.data.tokenizer != TOKENIZER:
        return ""
    if config.data.tokenizer_hash:
        return (
            f"Its tokenizer is the {TOKENIZER} here, which others get from the first site. Give it text to train on.\n"
        )
    family = FAMILY[config.model.preset.split("-")[0]]
    return f"Put the {TOKENIZER} of {family} here and {again}, or set another in [data], with text to train on.\n"

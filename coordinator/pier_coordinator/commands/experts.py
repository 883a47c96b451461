"""`pier-coordinator experts init | plan | start | status | collect`: from experts.toml to a plan, and to an ensemble.

The experts.toml that `init` writes shows every key of ExpertsConfig with its meaning and its value.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pier_coordinator.commands.client import Client
from pier_coordinator.commands.experts_view import CLASSES, Planning, columns, told, view
from pier_coordinator.experts.allocation import BudgetError
from pier_coordinator.experts.difficulty import ESTIMATED, Difficulty, Sample, estimated, probed
from pier_coordinator.experts.plan import Plan, UnplacedError, accepted, compared
from pier_coordinator.experts.recipe import Job
from pier_coordinator.experts.scheduling import Limits
from pier_coordinator.experts.task import Domain, Site, Size, Task
from pier_coordinator.identity.home import PLAN_FILE
from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.toml import write_new
from pier_node.base.units import UNKNOWN, amount, number, span
from pier_node.config.commented import DECIDES, Notes, commented
from pier_node.config.run import ModelSection, RunConfig
from pier_node.experts.card import ENSEMBLE_FILE, Ensemble, Member, load_card
from pier_node.experts.config import DomainSection, ExpertsConfig, SiteSection, load
from pier_node.experts.domains import MOST_ROWS, DomainText, read_domains
from pier_node.outer.layout import Layout
from pier_node.trainer.data.sources import HELD_OUT as HELD_OUT_PART
from pier_node.trainer.data.sources import SPLITS
from pier_node.trainer.model.cost import flops_per_token, sent_bytes, training_bytes

HEAD = """\
# An ensemble of domain experts, as input for `pier-coordinator experts plan`.
# Every key has a default and may be left out. A line `#key = …` shows a default that depends on another key
# of its section. Remove the # to change it.
"""
SITES = """\
# A domain of your own:
#
#   [[domains]]
#   name = "contracts"
#   source = "parquet"               # text, jsonl or parquet; a built-in domain needs only a name
#   path = "/data/contracts"
#   text_field = "body"
#   weight = 2.0
#   sites = ["lab-a"]                # no other site may see it

# The sites that train. Without [[sites]], the sites that train in the run in --data, at their speed there.
# Remove the # to list your own:
#
#   [[sites]]
#   name = "lab-a"
#   tflops = 60.0                    # measured in training: 1e-12 * (FLOPs per token) * (tokens/s); never the peak
#   memory_gb = 24.0                 # memory of the training device, GB; 0 or left out: no limit
#   line_mbit = 100.0                # speed of the link, Mbit/s; 0 or left out: no limit
#   hours = 12.0                     # hours that the site is available; 0 or left out: no limit
"""

OWN = {
    "model.preset": "Named model of size S, the model of run.toml. It sets defaults of other keys here; each can be "
    "changed. M and L differ only in ffn_dim. A token is a byte.",
    "domains.name": "Name of the domain. For a built-in domain, it selects the domain.",
}


def experts_toml(preset: str = "") -> str:
    """The text of an experts.toml; values that follow from the preset are in lines that begin with #."""
    config = ExpertsConfig.model_validate({"model": {"preset": preset} if preset else {}})
    return "\n".join([HEAD, *commented(config, Notes(OWN, decides=DECIDES)), SITES])


TRAIN, HELD_OUT = 1 << 18, 1 << 16
"""Maximum bytes of a domain that n-grams are trained on and scored on."""
AT_WORK = ("training", "exchanging", "waiting")
"""States of a site whose speed is known and counts."""


def init(file: Path, preset: str, force: bool) -> str:
    """Write the file; return what to do next. Raises PierError: it exists (without `force`) or cannot be written."""
    write_new(file, experts_toml(preset), force)
    plan = f"pier-coordinator experts plan {shlex.quote(str(file))}"
    return (
        f"Wrote {file}: the domains, the choices for their experts, and the budget, each explained.\n"
        f"List the sites that train in it ([[sites]]), then run:\n\n  {plan}\n"
    )


NOT_STARTED = "This is a plan, nothing has been started: `pier-coordinator experts start` does it."


def plan(file: Path, folder: Path, as_json: bool) -> None:
    """Print the plan of the file's mode and what the other modes would give. Raises PierError."""
    planning = planned(load(file), folder)
    if as_json:
        print(json.dumps(told(planning)))
    else:
        Console().print(view(planning), Text(NOT_STARTED, "dim"))


def planned(config: ExpertsConfig, folder: Path) -> Planning:
    """Measure the domains and make the plans. Raises PierError."""
    sites = [_site(given) for given in config.sites] or registered(folder)
    with Console(stderr=True).status(f"Reading {len(config.domains)} domains…"):
        texts = read_domains(config.domains, TRAIN, HELD_OUT)
        task = task_of(config, texts)
        difficulty = _measured(task, texts)
    limits = Limits(config.plan.time_limit_s, config.plan.gap)
    with Console(stderr=True).status("Planning…"):
        plans = compared(task, difficulty, sites, limits)
    chosen = plans[config.experts.heterogeneity]
    if not isinstance(chosen, Plan):
        raise _explained(chosen, sites)
    return Planning(task, difficulty, sites, plans, chosen, [text.digest for text in texts])


def task_of(config: ExpertsConfig, texts: Sequence[DomainText]) -> Task:
    """The planning task of a file, for the texts of its domains."""
    wanted, context = config.experts, config.model.context
    small, medium, large = (_size(name, model) for name, model in zip("SML", config.sized()))
    return Task(
        domains=tuple(
            _domain(section, text, context, wanted.difficulty.get(section.name))
            for section, text in zip(config.domains, texts)
        ),
        sizes=(small, medium, large),
        steps=wanted.steps,
        step_tokens=wanted.batch_size * context,
        budget=wanted.budget_flops,
        horizon=wanted.horizon_s,
        max_epochs=wanted.max_epochs,
        setup=wanted.setup_s,
        chain=wanted.lineage == "chain",
    )


def registered(folder: Path) -> list[Site]:
    """The sites that train in a run, with their speeds there. Raises PierError."""
    try:
        client = Client.of(folder)
    except PierError as error:
        raise PierError(
            "experts.toml has no [[sites]], and " + error.problem,
            "Add [[sites]] to it, or give a run with --data FOLDER.",
        ) from error
    flops = flops_per_token(client.home.config.model)
    rows = [row for row in client.get("/api/nodes")["sites"] if row["state"] in AT_WORK and row["tokens_per_second"]]
    if not rows:
        raise PierError(
            f"no site trains in the run in {folder}, so no speed is known", "Add [[sites]] to experts.toml."
        )
    return [Site(row["name"], flops * row["tokens_per_second"], line=row["uplink"] or math.inf) for row in rows]


def _domain(section: DomainSection, text: DomainText, context: int, given: str | None) -> Domain:
    judged = _judged(text, context)
    by_hand = CLASSES.index(given) if given else ESTIMATED
    return Domain(section.name, section.weight, text.tokens, judged, text.sent, frozenset(section.sites), by_hand)


def _judged(text: DomainText, context: int) -> int:
    """Approximate tokens that an expert is judged on: a site divides the held-out documents and cuts them into rows."""
    held_out = text.tokens * HELD_OUT_PART / (1 - HELD_OUT_PART)
    return min(MOST_ROWS, int(held_out / len(SPLITS) / context)) * context


def _size(name: str, model: ModelSection) -> Size:
    parameters = float(Layout.of(model).length)
    return Size(name, parameters, flops_per_token(model), training_bytes(model), sent_bytes(model))


def _site(given: SiteSection) -> Site:
    return Site(
        given.name,
        given.tflops * 1e12,
        given.memory_gb * 1e9 or math.inf,
        given.line_mbit * 125e3 or math.inf,
        given.hours * 3600 or math.inf,
    )


def _measured(task: Task, texts: Sequence[DomainText]) -> Difficulty:
    samples = [Sample(text.train, text.held_out) for text in texts]
    try:
        probes = probed(samples, task.choice.parameters)
    except ValueError as error:
        short = texts[error.args[0]]
        raise PierError(
            f"domain {short.name}: {amount(len(short.held_out))} of held-out text is too little to measure it",
            "Give it more text.",
        ) from error
    return estimated(probes, task.choice, task.weights).of_stand_ins(task.choice)


def _explained(error: BudgetError | UnplacedError, sites: Sequence[Site]) -> PierError:
    if isinstance(error, BudgetError):
        return PierError(
            f"the budget is too small for the minimum steps of each domain: {error.needed:.3g} FLOPs are needed",
            "Raise experts.budget_flops or horizon_s, or lower experts.steps.",
        )
    if not error.jobs:
        return PierError("the experts do not all fit into the hours of the sites", "Lower the budget, or add sites.")
    job = error.jobs[0]
    lacks = ", ".join(f"{site.name} {_lack(job, site)}" for site in sites)
    needs = f"size {job.size.name}, {amount(job.size.memory)} of memory"
    return PierError(
        f"the expert of {job.name} ({needs}) fits at no site: {lacks}",
        "Add a site, or lower experts.sizes or [model].",
    )


def _lack(job: Job, site: Site) -> str:
    if job.size.memory > site.memory:
        return f"has {amount(site.memory)}"
    return "is not available for long enough" if job.fits(site) else "may not see its text"


COLUMNS = "domain", "size", "steps", "site", "done", "expected", "took", "before", "after", "±", "expert"
LEGEND = """\
expected: with transfers, and at the speed that the site has shown if the coordinator has planned again since.
before, after: bits per byte of the parent and of the expert. refused: it is no better, and the parent stands in."""


def start(file: Path, folder: Path, as_json: bool, *, yes: bool, dry_run: bool) -> None:
    """Plan, ask for confirmation, and let the sites train; with `dry_run`, do not ask, and start nothing.

    Raises:
        PierError: there is no such run, its model is another one, or there is no plan.
    """
    client, config = Client.of(folder), load(file)
    check_seed(config, client.home.config)
    planning = planned(config, folder)
    plan = accepted(config, planning.task, planning.chosen, planning.sites, planning.digests)
    if not as_json:
        Console().print(view(planning))
    if dry_run:
        print(json.dumps({"plan": plan.id}) if as_json else "Nothing was started (--dry-run).")
        return
    if not yes:
        click.confirm("Have the sites train these experts as soon as the run is finished?", abort=True)
    durable.replace(folder / PLAN_FILE, plan.model_dump_json(indent=1).encode())
    client.act("experts", plan=plan.id)
    follow = f"pier-coordinator experts status --data {shlex.quote(str(folder))}"
    print(json.dumps({"plan": plan.id}) if as_json else f"Accepted as {plan.id[:8]}. To follow it: {follow}")


def status(folder: Path, as_json: bool) -> bool:
    """Print which site trains what and how good it is; return whether all experts are done. Raises PierError."""
    known = Client.of(folder).act("experts-told")
    if as_json:
        print(json.dumps(known))
    elif known["plan"] is None:
        print("No plan was accepted yet: pier-coordinator experts start")
    else:
        complete = "complete" if known["complete"] else f"planned to take {span(known['seconds'])}"
        head = Text(f"plan {known['plan'][:8]}, {known['mode']}: {complete}")
        Console().print(head, experts_table(known["experts"]), Text(LEGEND, "dim"), sep="\n")
        if known["complete"]:
            said = f"\nTo have them answer:\n\n  {serving(known['experts'], folder)}\n"
            Console(markup=False).print(said, soft_wrap=True)
    return bool(known.get("complete"))


def serving(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """The shell command that collects an ensemble and serves it."""
    sites = " ".join(f"--from {site.upper()}_FOLDER" for site in sorted({row["site"] for row in rows}))
    collected = f"pier-coordinator experts collect ensemble --data {shlex.quote(str(folder))} {sites}"
    return f"{collected} && pier-node serve --experts ensemble"


def collect(folder: Path, sites: Sequence[Path], out: Path) -> str:
    """Copy the experts from the sites' folders into one; return what to tell the user. Raises PierError."""
    known = Client.of(folder).act("experts-told")
    if not known.get("complete"):
        missing = [row["domain"] for row in known["experts"] if not row["name"]]
        raise PierError(
            f"the ensemble is not complete: no expert yet of {', '.join(missing) or 'anything, no plan was accepted'}",
            "`pier-coordinator experts status` shows how far it is.",
        )
    if out.exists() and any(out.iterdir()) and not (out / ENSEMBLE_FILE).exists():
        raise PierError(f"{out} holds something else than an ensemble", "Name a new folder.")
    try:
        parents = {row["after"] for row in known["experts"]}
        members = [_found(row, sites) for row in known["experts"] if row["number"] not in parents]
        for _, place in members:
            shutil.copytree(place, out / place.name, dirs_exist_ok=True)
        Ensemble(members=tuple(member for member, _ in members)).save(out)
    except OSError as error:
        raise PierError(f"{out}: {error}", "Choose a folder that has room and can be written.") from error
    answering = f"pier-node serve --experts {shlex.quote(str(out))}"
    return f"Collected {len(members)} experts in {out}\nTo answer with them: {answering}"


def experts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table with a row per expert: what it is, which site trains it, and its result."""
    table = columns(*COLUMNS)
    for row in rows:
        gate = Text(UNKNOWN)
        if row["name"]:
            gate = Text("accepted", "green") if row["accepted"] else Text("refused", "yellow")
        losses = (number(row[key], 3) for key in ("parent_loss", "loss", "standard_error"))
        done = f"{100 * row['done'] / row['steps']:.0f} %"
        times = span(row["expected_seconds"]), UNKNOWN if row["seconds"] is None else span(row["seconds"])
        what = row["domain"], row["size"], str(row["steps"]), Text(row["site"] or "nobody")
        table.add_row(*what, done, *times, *losses, gate)
    return table


def check_seed(config: ExpertsConfig, run: RunConfig) -> None:
    """Check that experts can branch from the run's model. Raises PierError."""
    here, there = (each.model_dump(exclude={"preset"}) for each in (config.model, run.model))
    for key, value in here.items():
        if value != there[key]:
            raise PierError(
                f"S is not the model of the run: experts.toml has model.{key} = {value}, run.toml {there[key]}",
                "Give experts.toml the [model] of run.toml: experts branch from the run's model.",
            )
    if run.data.tokenizer != "bytes":
        raise PierError(
            f"the run has data.tokenizer = {run.data.tokenizer}: experts know bytes only", 'Run with "bytes".'
        )
    if run.outer.algorithm == "noloco" and not run.outer.final_merge:
        raise PierError(
            "in a run of pairs (noloco) each site ends with a model of its own: there is no common seed",
            "Set outer.final_merge = true in run.toml, or choose another outer.algorithm.",
        )


def _found(row: dict[str, Any], sites: Sequence[Path]) -> tuple[Member, Path]:
    """An expert, or its parent if it was refused, and the folder where it is."""
    place = _find(row["name"], sites, row)
    card = load_card(place)
    if not card.accepted:
        place = _find(card.parent[:32], [place.parent.parent], row)
    return Member(domain=row["domain"], folder=place.name, stands_in=not card.accepted), place


def _find(name: str, sites: Sequence[Path], row: dict[str, Any]) -> Path:
    for site in sites:
        if (found := site / "experts" / name).is_dir():
            return found
    raise PierError(
        f"the expert of {row['domain']} is in none of the folders: {row['site']} has it, as experts/{name}",
        "Name the --data folder of that site with --from, or a copy of it.",
    )

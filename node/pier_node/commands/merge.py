"""`pier-node merge`: the experts of an ensemble as one model, or a merged model without some of its experts.

The routers learn from the text of the domains that the experts were trained on, which must be here. At the end a table
says how well each expert alone, and the merged model, predict rows of each domain that nobody was trained on.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pier_node.base.errors import PierError
from pier_node.base.log import print_as_is
from pier_node.base.units import count
from pier_node.commands.ensemble import columns, sections_of
from pier_node.experts import merging
from pier_node.experts.card import load_ensemble
from pier_node.experts.merging import MergedDecoder
from pier_node.experts.scoring import mean_bits, texts_of
from pier_node.experts.serving.models import OwnModel, read_shelf
from pier_node.experts.sheet import Rows
from pier_node.rounds.saved_model import pick_device
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.export import require_ours

SEED = 1
INFORMING = 64
"""Windows of each domain from which `inform` takes its means."""


@dataclass(frozen=True)
class MergeOptions:
    """The options of `pier-node merge`.

    Attributes:
        folder: of an ensemble, or of a merged model.
        file: experts.toml, which says where the text of domains is; None: all are built-in ones.
        without: experts to leave out, by their names.
        active: experts that compute for a token.
        steps: of training after the merge; each takes one window of every domain.
        lr: of this training; None: the usual.
        routers_only: train nothing but the routers.
        rows: of each domain, to say how good the model is.
    """

    folder: Path
    out: Path
    file: Path | None
    without: tuple[str, ...]
    active: int
    steps: int
    lr: float | None
    routers_only: bool
    rows: int
    device: str
    force: bool


def merge(options: MergeOptions) -> None:
    """Write the model, and print what it is. Raises PierError."""
    if not options.force:
        require_ours(options.out)
    console = Console()
    model = _reduced(options) if merging.is_merged(options.folder) else _merged(options, console)
    parameters = sum(each.numel() for each in model.parameters())
    print_as_is(
        console,
        f"Wrote {len(model.names)} experts as one model, {model.active} of them active for a token: "
        f"{count(parameters)} parameters in fp32, {model.flops / 1e6:.3g} MFLOPs a token, to {options.out}\n\n"
        f"  pier-node serve --model {shlex.quote(str(options.out))}\n"
        f"  transformers.AutoModelForCausalLM.from_pretrained({str(options.out)!r})",
    )


def _reduced(options: MergeOptions) -> MergedDecoder:
    """A merged model without some experts. Raises PierError."""
    if not options.without:
        raise PierError(f"{options.folder} is a merged model already", "Leave experts out with --without NAME.")
    model = merging.load(options.folder)
    for name in options.without:
        model = merging.without(model, name)
    merging.save(model, options.out, str(options.folder / "tokenizer.json"))
    return model


def _merged(options: MergeOptions, console: Console) -> MergedDecoder:
    """The experts of an ensemble as one model. Raises PierError."""
    if options.active == 1 and options.steps:
        raise PierError(
            "with one active expert training cannot reach the routers: the share of what they pick is always 1",
            "Give --active 2 or more, or --steps 0.",
        )
    device = pick_device(options.device)
    experts = _experts(options, device)
    decoders = {expert.name: expert.load().model for expert in experts}
    model = merging.merge(decoders, options.active)
    names = [domain for expert in experts for domain in expert.domains]
    sections = {section.name: section for section in sections_of(names, options.file)}
    context = model.config.context
    with tempfile.TemporaryDirectory(prefix=".tokens-", dir=_parent(options.out)) as cache:
        texts = {
            name: Windows(open_corpus(each.data, 0, 1, None, Path(cache)), context, SEED, name)
            for name, each in sections.items()
        }
        samples = {expert.name: [texts[name].batch(0, INFORMING)[0] for name in expert.domains] for expert in experts}
        model.inform({name: np.concatenate(rows) for name, rows in samples.items()})
        if options.steps:
            _tune(model, texts, options)
    merging.save(model, options.out, str(experts[0].folder / "tokenizer.json"))
    held_out = texts_of(sections.values(), context, options.rows)
    console.print(_table(model, decoders, {name: held_out[name, "test"] for name in names}))
    return model


def _experts(options: MergeOptions, device: torch.device) -> list[OwnModel]:
    """The experts to merge. Raises PierError: one cannot be read, or there is none of a name to leave out."""
    wanted = {member.domain for member in load_ensemble(options.folder).members}
    experts = [expert for expert in read_shelf(options.folder, device)[0] if isinstance(expert, OwnModel)]
    if missing := sorted(wanted - {domain for expert in experts for domain in expert.domains}):
        raise PierError(
            f"{options.folder}: the expert of {missing[0]} cannot be read: see above", "Collect the experts again."
        )
    if unknown := sorted({*options.without} - {expert.name for expert in experts}):
        raise PierError(
            f"--without {unknown[0]}: there is no such expert", f"There are {', '.join(each.name for each in experts)}."
        )
    return [expert for expert in experts if expert.name not in options.without]


def _parent(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PierError(f"{out}: {error.strerror}", "Choose a folder that can be written.") from error
    return out


def _tune(model: MergedDecoder, texts: Mapping[str, Windows], options: MergeOptions) -> None:
    columns = (TextColumn("steps of training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=options.steps)
        merging.tune(
            model,
            merging.batches(texts.values(), options.steps),
            options.steps,
            options.lr or (merging.ROUTER_LR if options.routers_only else merging.LR),
            options.routers_only,
            lambda done: progress.advance(task, done),
        )


def _table(model: MergedDecoder, experts: Mapping[str, Decoder], texts: Mapping[str, Rows]) -> Table:
    """Bits per byte of the expert of each domain, and of the merged model."""
    table = columns("bits per byte")
    table.add_column("its expert", justify="right")
    table.add_column("merged", justify="right")
    own = {domain: expert for name, expert in experts.items() for domain in name.split("+")}
    found = [(mean_bits(own[domain], rows), mean_bits(model, rows)) for domain, rows in texts.items()]
    for domain, (alone, merged) in zip(texts, found):
        table.add_row(escape(domain), f"{alone:.3f}", f"{merged:.3f}")
    table.add_row("mean", *(f"{np.mean(column):.3f}" for column in zip(*found)))
    return table

"""Scores experts on the held-out text of domains: a score sheet for each expert, domain and split.

The score is log p of every byte, and it is all that is sent when an ensemble is scored. Each row starts without
context: its second token is predicted from its first alone. The models that experts branched from are scored once on
the test rows, which shows what each expert has forgotten.

`python -m pier_node.experts.scoring ORDER FOLDER OUT` scores on order in a separate process. ORDER is a file with a
ScoringOrder, FOLDER contains the experts by name, and OUT receives the sheets. The process prints a line of JSON for
each sheet and for everything that cannot be scored. Meanwhile the site's daemon stays responsive, and the process ends
with the daemon.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pier_node.base.errors import PierError
from pier_node.base.processes import die_with_parent
from pier_node.experts.card import CARD_FILE, WEIGHTS_FILE, digest_of, load_card
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out, rows_of
from pier_node.experts.sheet import SCORED, LogProbs, Parent, Rows, ScoringOrder, Sheet, Subject, row_hashes
from pier_node.rounds.saved_model import exported_weights, pick_device
from pier_node.trainer.data.sources import Split
from pier_node.trainer.data.tokens import FileTokenizer
from pier_node.trainer.model.evaluate import bits_per_byte, token_losses
from pier_node.trainer.model.export import read_config

BATCH = 32
"""Rows per batch."""


def log_probs(model: nn.Module, rows: Rows, done: Callable[[int], None] = lambda _rows: None) -> LogProbs:
    """Score rows, in fp32.

    Args:
        model: a complete decoder on any device; its context must not be shorter than the rows.
        done: called after each batch with its number of rows.
    """
    found = []
    for losses in token_losses(model, rows, BATCH):
        found.append(-losses.numpy())
        done(len(losses))
    return np.concatenate(found).astype(np.float32)


def mean_bits(model: nn.Module, rows: Rows) -> float:
    """Bits per byte of a model over rows of bytes; see `log_probs`."""
    return bits_per_byte(-float(log_probs(model, rows).mean()))


def spread(rows: Rows, most: int) -> Rows:
    """At most that many rows, evenly spaced over the text (0: all)."""
    if not most or len(rows) <= most:
        return rows
    return rows[np.arange(most) * len(rows) // most]


BYTES = bytes(range(32, 127)).decode()

log = logging.getLogger(__name__)
Texts = Mapping[tuple[str, Split], Rows]
"""The rows of the domains' splits."""


def expert_in(folder: Path) -> tuple[str, Path]:
    """The domain of the expert in a folder, and the folder of the model to score: the parent's, if it was refused.

    Raises:
        PierError: there is no expert.
    """
    card = load_card(folder)
    return card.domain, folder if card.accepted else folder.parent / card.parent[:32]


def parent_of(place: Path) -> Path | None:
    """The folder of the model that the expert in a folder branched from; None: it is not here.

    Raises:
        PierError: the expert's card is not valid.
    """
    if not (place / CARD_FILE).exists():
        return None
    found = place.parent / load_card(place).parent[:32]
    return found if (found / WEIGHTS_FILE).exists() else None


class Parents:
    """The parents of experts, scored on the test rows of some texts: once per parent and domain.

    Args:
        done: called with the number of further rows scored.
    """

    def __init__(self, texts: Texts, device: torch.device, done: Callable[[int], None] = lambda _rows: None) -> None:
        self._texts = {domain: rows for (domain, split), rows in texts.items() if split == "test"}
        self._device, self._done = device, done
        self._known: dict[tuple[Path, str], Parent | None] = {}
        self._models: dict[Path, nn.Module] = {}

    def of(self, place: Path, domain: str) -> Parent | None:
        """The log-probability that the expert's parent gives each row; None: the parent is not here or not usable."""
        parent = parent_of(place)
        if parent is None:
            return None
        if (parent, domain) not in self._known:
            self._known[parent, domain] = self._asked(parent, self._texts[domain])
        return self._known[parent, domain]

    def _asked(self, parent: Path, rows: Rows) -> Parent | None:
        try:
            if parent not in self._models:
                self._models = {parent: exported_weights(parent).model(self._device)}  # one at a time: they are large
            found: Parent = log_probs(self._models[parent], rows, self._done).sum(axis=1)
        except PierError as error:
            log.warning("what experts have forgotten of it is not known: %s", error)
            return None
        return found


def texts_of(sections: Iterable[DomainSection], context: int, most: int, digest: str = "") -> Texts:
    """The rows of every domain's splits to score, at most `most` of each (0: all).

    Args:
        digest: required digest of the text; "": any.

    Raises:
        PierError: a text cannot be read, is a different one, or is too short.
    """
    found: dict[tuple[str, Split], Rows] = {}
    for section in sections:
        text = read_held_out(section)
        if digest and text.digest != digest:
            raise PierError(f"domain {section.name}: the text here is not the one that was planned with")
        for split in SCORED:
            rows = spread(rows_of(text.texts[split], context), most)
            if not len(rows):
                raise PierError(
                    f"domain {section.name}: the {split} split has less than a row of {context + 1} bytes",
                    "Give the domain more text.",
                )
            found[section.name, split] = rows
    return found


def sheets_of(
    domain: str,
    place: Path,
    texts: Texts,
    device: torch.device,
    parents: Parents,
    done: Callable[[int], None] = lambda _rows: None,
) -> Iterator[Sheet]:
    """Score sheets of the model in a folder, which represents the expert of a domain, on these texts.

    Args:
        parents: the parents of such models.
        done: called with the number of further rows scored.

    Raises:
        PierError: there is no model with bytes as tokens.
    """
    if FileTokenizer(place / "tokenizer.json").encode(BYTES).tolist() != list(BYTES.encode()):
        raise PierError(f"{place}: its tokens are not bytes", "Experts are trained and scored on bytes.")
    model, digest = exported_weights(place).model(device), digest_of(place)
    for (name, split), rows in texts.items():
        about = Subject(expert=domain, weights=digest, domain=name, split=split)
        found, hashes = log_probs(model, rows, done), row_hashes(rows)
        yield Sheet(about, found, hashes, parents.of(place, name) if split == "test" else None)


@dataclass(frozen=True)
class Said:
    """A line of the process's output.

    Attributes:
        expert: name of the expert.
        domain: name of the domain; "": all domains.
        sheet: path of the sheet; "": there is none, and `problem` says why.
    """

    expert: str
    domain: str = ""
    sheet: str = ""
    problem: str = ""


async def scored(order: ScoringOrder, folder: Path, out: Path) -> AsyncGenerator[Said]:
    """Score in another process, which ends when this generator is closed. Raises PierError: it failed."""

    def written() -> str:
        out.mkdir(parents=True, exist_ok=True)
        file = out / "order.json"
        file.write_text(order.model_dump_json())
        return str(file)

    words = (sys.executable, "-m", __name__, await asyncio.to_thread(written), str(folder), str(out))
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl+C in the daemon's terminal must not reach it
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield Said(**json.loads(line))
        if await process.wait():
            raise PierError(f"scoring ended with exit code {process.returncode}", "The lines above say why.")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def said(order: ScoringOrder, folder: Path, out: Path) -> Iterator[Said]:
    """Score; the sheets are written to `out`."""
    places: dict[str, tuple[str, Path]] = {}
    contexts: list[int] = []
    for name in order.experts:
        try:
            domain, place = expert_in(folder / name)
            contexts.append(read_config(place).context)
            places[name] = domain, place
        except PierError as error:
            yield Said(name, problem=error.problem)
    if not places:
        return
    context = min(contexts)
    texts: Texts = {}
    for wanted in order.domains:
        try:
            texts = {**texts, **texts_of([wanted.section], context, order.rows, wanted.digest)}
        except PierError as error:
            yield from (Said(name, wanted.section.name, problem=error.problem) for name in places)
    device = pick_device("")
    parents = Parents(texts, device)
    for name, (domain, place) in places.items():
        try:
            for sheet in sheets_of(domain, place, texts, device, parents):
                yield Said(name, sheet.subject.domain, str(sheet.save(out)))
        except PierError as error:
            yield Said(name, problem=error.problem)


def main() -> None:
    """Print the results for `scored`."""
    die_with_parent()
    order, folder, out = map(Path, sys.argv[1:])
    for each in said(ScoringOrder.model_validate_json(order.read_text()), folder, out):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()

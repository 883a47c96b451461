"""Trains and scores one expert of bench/hdee.py in this process, with what a site's workers and commands are made of.

A cell is a folder named by the expert's content: its score sheets on all domains, its model, and cell.json. It appears
when it is whole, so that a run that was broken off goes on with the next one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.hdee_setting import SIZES, Arms, Setting, section
from pier_node.config.run import ModelSection, RunConfig
from pier_node.experts.domains import HeldOut, judging, read_held_out, rows_of
from pier_node.experts.job import SEED, ExpertJob
from pier_node.experts.scoring import log_probs, spread
from pier_node.experts.sheet import ENDING, Rows, Sheet, Subject, load_sheet, row_hashes
from pier_node.experts.trainer import Verdict, judged
from pier_node.rounds.saved_model import Weights
from pier_node.trainer.data.corpus import Corpus, Windows, open_corpus
from pier_node.trainer.data.sources import Split
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.evaluate import Losses, row_losses
from pier_node.trainer.model.export import export, import_weights
from pier_node.trainer.model.initial import initial_weights, widened
from pier_node.trainer.replica import Replica

CPU = torch.device("cpu")
CELL, MODEL = "cell.json", "model"
SEED_MODEL = "seed"


class MissingError(Exception):
    """A cell is not there, and is not to be trained."""


class Cell(BaseModel):
    """What was trained, in executed steps, tokens and FLOPs, and CPU seconds; the gate's verdict if it is an expert.

    Attributes:
        after: the name of the cell before it in a chain.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    domain: str
    size: str
    steps: int
    tokens: int
    flops: float
    seconds: float
    accepted: bool = True
    loss: float = 0.0
    parent_loss: float = 0.0
    after: str = ""


class Texts:
    """The domains, each read once: to train on, to judge by, and to score on."""

    def __init__(self, setting: Setting, cache: Path) -> None:
        self._setting, self.cache = setting, cache
        self.sections = {name: section(name) for name in setting.domains}

    @cached_property
    def corpora(self) -> dict[str, Corpus]:
        """To train on, as a worker opens them."""
        return {name: open_corpus(each.data, 0, 1, None, self.cache) for name, each in self.sections.items()}

    @cached_property
    def held_out(self) -> dict[str, HeldOut]:
        """What no model trains on."""
        scored = *self._setting.domains, *self._setting.excluded
        return {name: read_held_out(section(name)) for name in scored}

    @cached_property
    def scored(self) -> dict[tuple[str, Split], Rows]:
        """Rows of the prior and the test split of each domain, [rows, context + 1]."""
        context, found = self._setting.context, dict[tuple[str, Split], Rows]()
        wanted: dict[Split, int] = {"prior": self._setting.prior_rows, "test": self._setting.test_rows}
        for name, text in self.held_out.items():
            for split, most in wanted.items():
                found[name, split] = spread(rows_of(text.texts[split], context), most)
        return found

    def windows(self, domain: str, seed: int, node: str) -> Windows:
        """Windows of a domain to train on."""
        return Windows(self.corpora[domain], self._setting.context, seed, node)


@dataclass(frozen=True)
class Model:
    """A trained model: flat fp32 weights, [parameters]."""

    config: ModelSection
    flat: Tensor

    @property
    def name(self) -> str:
        """SHA-256 of the weights, hex."""
        return hashlib.sha256(self.flat.numpy().tobytes()).hexdigest()

    def rated(self, rows: Rows) -> Losses:
        """Nats a token of each row, [rows]."""
        return row_losses(Weights(self.config, self.flat, "bytes", "").model(CPU), rows, 32)


def train(config: RunConfig, flat: Tensor, sources: Sequence[Windows], sequences: int) -> Model:
    """All steps of a run, `sequences` of each source at every step; AdamW begins at zero."""
    replica = Replica(config, CPU, workers=1)
    replica.load_weights(flat)
    for step in range(config.inner.total_steps):
        inputs, targets = zip(*(windows.batch(step, sequences) for windows in sources))
        replica.train(step, (np.concatenate(inputs), np.concatenate(targets)), sequences * len(sources))
    made = torch.empty(replica.layout.length)
    replica.store_weights(made)
    return Model(config.model, made)


class Shop:
    """Where the models of one seed are made, and kept.

    Args:
        folder: of this seed.

    Attributes:
        trains: what is missing is trained; else MissingError is raised.
    """

    def __init__(self, arms: Arms, texts: Texts, seed: int, folder: Path) -> None:
        self._arms, self._texts, self._seed, self._folder = arms, texts, seed, folder
        self.trains = True
        self._run = arms.setting.run(seed)
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def parent(self) -> Model:
        """The seed model: S, trained alike on all domains that are not private."""
        file = self._folder / "seed.safetensors"
        if self._is_missing(file):
            start = initial_weights(self._run.model, self._seed)
            save_file({"weights": self._mixed(self._run, start, "seed").flat}, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
        return Model(self._run.model, load_file(file)["weights"])

    def experts(self, jobs: Mapping[str, ExpertJob]) -> dict[str, Path]:
        """The cell of each of these, by domain; in a chain each branches from the one before it, or what stands in."""
        places, numbers = dict[str, Path](), {job.number: domain for domain, job in jobs.items()}
        for domain, job in jobs.items():
            places[domain] = self.expert(job, None if job.after == SEED else places[numbers[job.after]])
        return places

    def expert(self, job: ExpertJob, after: Path | None = None) -> Path:
        """The cell of an expert; `after` is the one before it in a chain."""
        parent = self.parent if after is None else model_of(standing(after))
        place = self._folder / job.name(parent.name, self._run)
        if self._is_missing(place):
            config, began = job.run(self._run), time.process_time()
            windows = self._texts.windows(job.domain.name, job.seed, job.domain_hash)
            start = widened(parent.config, config.model, parent.flat, job.seed)
            made = train(config, start, [windows], job.batch_size)
            spent = time.process_time() - began
            cell = self._cell(config, job.domain.name, job.size, spent, self._judged(job.domain.name, made, parent))
            self._keep(place, made, cell.model_copy(update={"after": after.name} if after else {}))
        return place

    def seed_model(self) -> Path:
        """The cell of the seed model, which stands in for experts that are refused."""
        place = self._folder / SEED_MODEL
        if self._is_missing(place):
            self._keep(place, self.parent, self._cell(self._run, SEED_MODEL, "S", 0.0))
        return place

    def dense(self, size: str) -> Path:
        """The cell of a single model that continues from the seed with all domains, for all experts' compute."""
        share = self._arms.setting.dense_share
        place = self._folder / (f"dense-{size}" if share == 1 else f"dense-{size}-{share:g}")
        if self._is_missing(place):
            first, began = self._arms.jobs("MHo-IHo", self._seed)[self._arms.setting.domains[0]], time.process_time()
            kind = self._arms.setting.experts(self._seed).sized()[SIZES.index(size)]
            changed = {"steps": self._arms.dense_steps(size), "size": size, "ffn_dim": kind.ffn_dim}
            config = first.model_copy(update=changed).run(self._run)
            start = widened(self.parent.config, config.model, self.parent.flat, self._seed)
            made = self._mixed(config, start, "dense")
            self._keep(place, made, self._cell(config, "dense", size, time.process_time() - began))
        return place

    def _is_missing(self, place: Path) -> bool:
        if not place.exists() and not self.trains:
            raise MissingError(place)
        return not place.exists()

    def _mixed(self, config: RunConfig, flat: Tensor, node: str) -> Model:
        """Trained on all domains that are not private, as many rows of each at every step."""
        sources = [self._texts.windows(name, self._seed, f"{node} {name}") for name in self._arms.setting.shared]
        rows, left = divmod(config.inner.batch_size, len(sources))
        assert not left, "a step has as many rows of each domain"
        return train(config, flat, sources, rows)

    def _judged(self, domain: str, made: Model, parent: Model) -> Verdict:
        rows = judging(self._texts.held_out[domain], self._run.model.context)
        return judged(made.rated(rows), parent.rated(rows))

    def _cell(self, config: RunConfig, domain: str, size: str, spent: float, verdict: Verdict | None = None) -> Cell:
        inner = config.inner
        tokens = inner.total_steps * inner.batch_size * config.model.context
        executed = {"steps": inner.total_steps, "tokens": tokens, "flops": flops_per_token(config.model) * tokens}
        gate = {}
        if verdict:
            gate = {key: getattr(verdict, key) for key in ("accepted", "loss", "parent_loss")}
        return Cell.model_validate({"domain": domain, "size": size, "seconds": spent, **executed, **gate})

    def _keep(self, place: Path, made: Model, cell: Cell) -> None:
        """Score a model on all domains and write its cell, all at once."""
        building = place.with_name(f"{place.name}.new")
        building.mkdir(exist_ok=True)
        model, digest = Weights(made.config, made.flat, "bytes", "").model(CPU), made.name
        for (domain, split), rows in self._texts.scored.items():
            subject = Subject(expert=cell.domain, weights=digest, domain=domain, split=split)
            Sheet(subject, log_probs(model, rows), row_hashes(rows)).save(building)
        export(made.config, made.flat, building / MODEL)
        (building / CELL).write_text(cell.model_dump_json())
        building.rename(place)


def sheets(places: Mapping[str, Path]) -> list[Sheet]:
    """The sheets of an ensemble, cell by cell; one that stands in for several domains comes once."""
    cells = dict.fromkeys(places.values())
    return [load_sheet(path) for place in cells for path in sorted(place.glob(f"*{ENDING}"))]


def standing(place: Path) -> Path:
    """The cell of an expert, or if it was refused that of its parent, which stands in for it."""
    cell = cell_of(place)
    return place if cell.accepted else standing(place.with_name(cell.after or SEED_MODEL))


def model_of(place: Path) -> Model:
    """The model of a cell."""
    return Model(*import_weights(place / MODEL))


def cell_of(place: Path) -> Cell:
    """What is known of a cell."""
    return Cell.model_validate_json((place / CELL).read_text())

"""Experts on disk and in memory: loaded when first asked; the least recently asked are evicted when memory is full.

A request reserves all its experts at once, and waits until they fit next to the experts that are in use. No request
holds some experts while it waits for more, so requests cannot deadlock. What each expert is gets read from its files
before any weights are loaded.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pier_node.base.errors import PierError
from pier_node.base.tasks import Signal
from pier_node.base.units import amount
from pier_node.config.run import ModelSection
from pier_node.experts.card import CARD_FILE, load_card
from pier_node.experts.ensemble import load_ensemble
from pier_node.experts.mixture import Array
from pier_node.outer.layout import Layout
from pier_node.rounds.weights import exported_weights
from pier_node.trainer.data.tokens import FileTokenizer, Tokenizer
from pier_node.trainer.model.cost import forward_flops_per_token
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.export import read_config

FP32 = 4

log = logging.getLogger(__name__)


class Entry(Protocol):
    """What a pool needs to know about an expert."""

    @property
    def name(self) -> str:
        """The expert's name for people."""

    @property
    def size(self) -> int:
        """Bytes of its weights in memory."""

    def load(self) -> Decoder:
        """Load its model. Raises PierError and any error of reading files."""


@dataclass(frozen=True)
class Expert:
    """An expert on disk; see `Entry`.

    Attributes:
        domains: the domains that it is for: several if it is the parent that stands in for their experts.
    """

    domains: tuple[str, ...]
    folder: Path
    config: ModelSection
    device: torch.device

    @property
    def name(self) -> str:
        """Its domain, or all of them."""
        return "+".join(self.domains)

    @property
    def size(self) -> int:
        """Bytes of its weights in memory, fp32."""
        return FP32 * Layout.of(self.config).length

    @property
    def flops(self) -> float:
        """FLOPs of predicting a token."""
        return forward_flops_per_token(self.config)

    def load(self) -> Decoder:
        """Load the weights; with a card, they must be those that it names. Raises PierError."""
        if (self.folder / CARD_FILE).exists():
            load_card(self.folder)
        weights = exported_weights(self.folder)
        if weights.config != self.config:
            raise PierError(f"{self.folder}: config.json has changed", "Start `pier-node serve` again.")
        return weights.model(self.device)


def read_shelf(folder: Path, device: torch.device) -> tuple[list[Expert], Tokenizer]:
    """The experts in an ensemble's folder and their common tokenizer. Unreadable experts are left out with a warning.

    Raises:
        PierError: there is no ensemble, none of its experts can be read, or two have different tokenizers.
    """
    found: list[tuple[Expert, Tokenizer]] = []
    domains: dict[str, list[str]] = {}
    for member in load_ensemble(folder).members:
        domains.setdefault(member.folder, []).append(member.domain)
    for name, its in domains.items():
        place = folder / name
        try:
            expert = Expert(tuple(its), place, read_config(place), device)
            found.append((expert, FileTokenizer(place / "tokenizer.json")))
        except PierError as error:
            log.warning("the expert of %s is left out: %s", " and ".join(its), error.problem)
    if not found:
        raise PierError(f"{folder}: none of the experts can be read", "Collect the experts again.")
    _check_alike(found)
    return [expert for expert, _ in found], found[0][1]


def even_prior(experts: Sequence[Expert]) -> Array:
    """The same prior for each domain, [experts]."""
    counts = np.array([len(expert.domains) for expert in experts], dtype=np.float64)
    return np.asarray(counts / counts.sum())


def _check_alike(found: Sequence[tuple[Expert, Tokenizer]]) -> None:
    """All experts must predict the same tokens, so that their probabilities can be added."""
    first, tokenizer = found[0]
    for expert, own in found[1:]:
        if own.fingerprint != tokenizer.fingerprint or expert.config.vocab_size != first.config.vocab_size:
            raise PierError(
                f"{expert.folder} and {first.folder} have unlike tokenizers", "Experts that are mixed share one."
            )


class Lost(Exception):
    """An expert cannot be asked any more: its files are missing or damaged, or its output is not a number."""


class Pool:
    """Experts by index, of which as many are in memory as fit.

    Args:
        entries: all experts.
        memory: bytes for weights; 0: no limit.

    Attributes:
        lost: the experts that cannot be asked any more.
    """

    def __init__(self, entries: Sequence[Entry], memory: int = 0) -> None:
        self.lost: set[int] = set()
        self._entries, self._memory = entries, memory
        self._sizes = [entry.size for entry in entries]
        self._models: OrderedDict[int, Decoder] = OrderedDict()  # the least recently asked first
        self._users: Counter[int] = Counter()
        self._changed = Signal()

    @property
    def alive(self) -> list[int]:
        """The experts that can be asked."""
        return [index for index in range(len(self._entries)) if index not in self.lost]

    def check_room(self, most: int) -> None:
        """Raise PierError unless any `most` experts fit together (0: all)."""
        sizes = sorted(self._sizes, reverse=True)[: most or None]
        if self._memory and sum(sizes) > self._memory:
            raise PierError(
                f"--memory {amount(self._memory)} is too little: {len(sizes)} experts take {amount(sum(sizes))}",
                "Give more, or have fewer experts answer a request with --top-k.",
            )

    @asynccontextmanager
    async def reserved(self, wanted: Iterable[int]) -> AsyncIterator[None]:
        """Reserve memory for these experts until the end of the block; waits for it."""
        experts = {*wanted}
        await self._changed.until(lambda: self._fits(experts))
        self._users.update(experts)
        try:
            yield
        finally:
            self._users.subtract(experts)
            self._changed.notify()

    def model(self, index: int) -> Decoder:
        """The model of an expert whose memory is reserved. Always called from the same thread.

        Raises:
            Lost: it cannot be read; it is not tried again.
        """
        entry = self._entries[index]
        if index in self.lost:
            raise Lost(entry.name)
        if index not in self._models:
            self._make_room(entry)
            try:
                self._models[index] = entry.load()
            except Exception as error:  # whatever is wrong with one expert, the others continue
                self.lose(index, error)
                raise Lost(entry.name) from error
            log.info("the expert of %s was read: %s", entry.name, amount(entry.size))
        self._models.move_to_end(index)
        return self._models[index]

    def lose(self, index: int, why: object) -> None:
        """Stop using an expert."""
        self.lost.add(index)
        self._models.pop(index, None)
        log.warning("the expert of %s drops out: %s", self._entries[index].name, str(why).splitlines()[0])

    @property
    def resident(self) -> list[int]:
        """The experts in memory, the least recently asked first."""
        return [*self._models]

    def _fits(self, experts: set[int]) -> bool:
        used = experts | {index for index, users in self._users.items() if users > 0}
        return not self._memory or sum(self._sizes[index] for index in used) <= self._memory

    def _make_room(self, entry: Entry) -> None:
        held = sum(self._sizes[index] for index in self._models)
        for index in self.resident:
            if not self._memory or held + entry.size <= self._memory:
                return
            if self._users[index] <= 0:
                del self._models[index]
                held -= self._sizes[index]
                log.info("the expert of %s makes room for that of %s", self._entries[index].name, entry.name)

"""Experts that can be asked: what each of them is, read from its files before any weights are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pier_node.commands.weights import exported_weights
from pier_node.config import ModelSection
from pier_node.data.tokens import FileTokenizer, Tokenizer
from pier_node.errors import PierError
from pier_node.experts.card import CARD_FILE, load_card
from pier_node.experts.ensemble import load_ensemble
from pier_node.experts.weights import Array
from pier_node.model.decoder import Decoder
from pier_node.model.export import read_config
from pier_node.model.flops import forward_flops_per_token
from pier_node.model.layout import Layout

FP32 = 4

log = logging.getLogger(__name__)


class Entry(Protocol):
    """What a pool wants to know of an expert."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def size(self) -> int:
        """Bytes of its weights in memory."""

    def load(self) -> Decoder:
        """Its model. Raises PierError and whatever reading files does."""


@dataclass(frozen=True)
class Expert:
    """An expert on the disk; see `Entry`.

    Attributes:
        domains: those that it is for: several, where it is the parent that stands in for their experts.
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
        """Read the weights; those of an expert with a card are the ones that it names. Raises PierError."""
        if (self.folder / CARD_FILE).exists():
            load_card(self.folder)
        weights = exported_weights(self.folder)
        if weights.config != self.config:
            raise PierError(f"{self.folder}: config.json has changed", "Start `pier-node serve` again.")
        return weights.model(self.device)


def read_shelf(folder: Path, device: torch.device) -> tuple[list[Expert], Tokenizer]:
    """The experts of an ensemble's folder and the tokenizer that they share; what cannot be read is left out, and said.

    Raises:
        PierError: there is no ensemble, none of its experts can be read, or two have unlike tokenizers.
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
    """The same for each domain, [experts]."""
    counts = np.array([len(expert.domains) for expert in experts], dtype=np.float64)
    return np.asarray(counts / counts.sum())


def _check_alike(found: Sequence[tuple[Expert, Tokenizer]]) -> None:
    """All predict the same tokens, so that their probabilities can be added."""
    first, tokenizer = found[0]
    for expert, own in found[1:]:
        if own.fingerprint != tokenizer.fingerprint or expert.config.vocab_size != first.config.vocab_size:
            raise PierError(
                f"{expert.folder} and {first.folder} have unlike tokenizers", "Experts that are mixed share one."
            )

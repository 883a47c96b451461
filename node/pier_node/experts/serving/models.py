"""Models on disk that can answer: Pier's own decoder, experts that were merged, and what transformers computes.

What a model is gets read from its files before any weights are loaded.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts import merging
from pier_node.experts.card import CARD_FILE, ENSEMBLE_FILE, load_card, load_ensemble
from pier_node.experts.mixture import Array
from pier_node.experts.serving.tokenizer import ModelTokenizer
from pier_node.outer.layout import Layout
from pier_node.rounds.saved_model import exported_weights
from pier_node.trainer.model.cost import forward_flops_per_token
from pier_node.trainer.model.decoder import Decoder, Past
from pier_node.trainer.model.export import read_config
from pier_node.trainer.model.hub import UNBOUNDED

FP32 = 4

log = logging.getLogger(__name__)


class LanguageModel(Protocol):
    """A model in memory."""

    @property
    def context(self) -> int:
        """Maximum number of tokens that it sees."""

    def follow(self, tokens: list[int], past: Any) -> tuple[Tensor, Any]:
        """Read more tokens.

        Args:
            past: what the model keeps of the tokens before them, as the last call returned it; None: there are none.

        Returns:
            The logits after each token, [tokens, vocab], and the new past.
        """


class OwnReader:
    """Pier's decoder in memory; see `LanguageModel`."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.context = model, model.config.context

    def follow(self, tokens: list[int], past: Past | None) -> tuple[Tensor, Past]:
        """See LanguageModel."""
        device = next(self.model.parameters()).device
        past = past or Past(self.model.config, device)
        return self.model(torch.tensor([tokens], device=device), past)[0], past


class HubReader:
    """A model of transformers in memory; see `LanguageModel`."""

    def __init__(self, model: Any, context: int) -> None:
        self.context, self._model = context, model

    def follow(self, tokens: list[int], past: Any) -> tuple[Tensor, Any]:
        """See LanguageModel."""
        inputs = torch.tensor([tokens], device=self._model.device)
        told = self._model(input_ids=inputs, past_key_values=past, use_cache=True)
        if getattr(told, "past_key_values", None) is None:
            raise PierError(f"{type(self._model).__name__} keeps no keys and values, which serving needs")
        return told.logits[0], told.past_key_values


@dataclass(frozen=True)
class Expert(ABC):
    """A model on disk.

    Attributes:
        domains: what it is for: several domains if it is the parent that stands in for their experts; its own name if
            it answers alone.
        vocab_size: number of tokens that it predicts.
        size: bytes of its weights in memory.
        flops: FLOPs of predicting a token.
    """

    domains: tuple[str, ...]
    folder: Path
    device: torch.device
    vocab_size: int
    size: int
    flops: float

    @property
    def name(self) -> str:
        """Its name for people: its domain, or all of them."""
        return "+".join(self.domains)

    @abstractmethod
    def load(self) -> LanguageModel:
        """Load the weights. Raises PierError."""


@dataclass(frozen=True)
class OwnModel(Expert):
    """A model that Pier's decoder knows."""

    config: ModelSection

    @classmethod
    def found(cls, domains: tuple[str, ...], folder: Path, device: torch.device) -> Self:
        """Describe the model in a folder. Raises PierError."""
        config = read_config(folder)
        size, flops = FP32 * Layout.of(config).length, forward_flops_per_token(config)
        return cls(domains, folder, device, config.vocab_size, size, flops, config)

    def load(self) -> OwnReader:
        """Load the weights; with a card, they must be those that it names. Raises PierError."""
        if (self.folder / CARD_FILE).exists():
            load_card(self.folder)
        weights = exported_weights(self.folder)
        if weights.config != self.config:
            raise PierError(f"{self.folder}: config.json has changed", "Start `pier-node serve` again.")
        return OwnReader(weights.model(self.device))


@dataclass(frozen=True)
class MergedModel(Expert):
    """Experts that were merged into one model."""

    @classmethod
    def found(cls, folder: Path, device: torch.device) -> Self:
        """Describe the model in a folder. Raises PierError."""
        model = merging.empty(folder)
        size = FP32 * sum(each.numel() for each in model.parameters())
        return cls((folder.resolve().name,), folder, device, model.config.vocab_size, size, model.flops)

    def load(self) -> OwnReader:
        """Load the weights. Raises PierError."""
        return OwnReader(merging.load(self.folder).to(self.device))


@dataclass(frozen=True)
class HubModel(Expert):
    """A model in Hugging Face's format that transformers computes, as Pier's decoder does not know it."""

    context: int

    @classmethod
    def found(cls, folder: Path, device: torch.device) -> Self:
        """Describe the model in a folder. Raises PierError."""
        transformers = _library(folder)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
            raise _unreadable(folder, error) from error
        text = config.get_text_config()
        flops = 2.0 * sum(each.numel() for each in model.parameters())
        size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
        context = getattr(text, "max_position_embeddings", None) or UNBOUNDED
        return cls((folder.resolve().name,), folder, device, text.vocab_size, size, flops, context)

    def load(self) -> HubReader:
        """Load the weights, in the precision that they are stored in. Raises PierError."""
        transformers = _library(self.folder)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, torch_dtype="auto", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise _unreadable(self.folder, error) from error
        return HubReader(model.to(self.device).eval(), self.context)


def _library(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PierError(
            f"{folder}: Pier's own decoder does not know this model, and transformers is not installed",
            "Install the package transformers, and start this again.",
        ) from error
    return transformers


def _unreadable(folder: Path, error: Exception) -> PierError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PierError(
        f"{folder}: transformers cannot read this model: {first}",
        "Give the folder of a causal language model, with config.json and *.safetensors.",
    )


def read_model(folder: Path, device: torch.device) -> tuple[Expert, ModelTokenizer]:
    """The single model in a folder and its tokenizer: Pier's decoder computes it if it can, else transformers.

    Raises:
        PierError: neither can, or there is no tokenizer.
    """
    if not (folder / "config.json").exists():
        ensemble = (folder / ENSEMBLE_FILE).exists()
        raise PierError(
            f"{folder} is no model: it has no config.json",
            f"It is an ensemble: give it as --experts {folder}." if ensemble else "Write one with: pier-node export",
        )
    tokenizer = ModelTokenizer(folder, begin=True)
    if merging.is_merged(folder):
        return MergedModel.found(folder, device), tokenizer
    try:
        return OwnModel.found((folder.resolve().name,), folder, device), tokenizer
    except PierError as unknown:
        log.info("transformers computes this model, as Pier's decoder does not know it: %s", unknown.problem)
        return HubModel.found(folder, device), tokenizer


def read_shelf(folder: Path, device: torch.device) -> tuple[list[Expert], ModelTokenizer]:
    """The experts in an ensemble's folder and their common tokenizer. Unreadable experts are left out with a warning.

    Raises:
        PierError: there is no ensemble, none of its experts can be read, or two have different tokenizers.
    """
    found: list[tuple[Expert, ModelTokenizer]] = []
    domains: dict[str, list[str]] = {}
    for member in load_ensemble(folder).members:
        domains.setdefault(member.folder, []).append(member.domain)
    for name, its in domains.items():
        place = folder / name
        try:
            found.append((OwnModel.found(tuple(its), place, device), ModelTokenizer(place)))
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


def _check_alike(found: Sequence[tuple[Expert, ModelTokenizer]]) -> None:
    """All experts must predict the same tokens, so that their probabilities can be added."""
    first, tokenizer = found[0]
    for expert, own in found[1:]:
        if own.fingerprint != tokenizer.fingerprint or expert.vocab_size != first.vocab_size:
            raise PierError(
                f"{expert.folder} and {first.folder} have unlike tokenizers", "Experts that are mixed share one."
            )

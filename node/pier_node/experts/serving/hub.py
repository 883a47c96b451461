"""Models in Hugging Face's format that Pier's own decoder does not know; transformers computes them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pier_node.base.errors import PierError

UNBOUNDED = 1 << 20
"""Context of a model that names none."""


@dataclass(frozen=True)
class SingleModel:
    """A model on disk that answers alone; see `Expert`, whose attributes it has."""

    name: str
    folder: Path
    device: torch.device
    vocab_size: int
    size: int
    flops: float

    @property
    def domains(self) -> tuple[str, ...]:
        """It is for everything."""
        return (self.name,)


@dataclass(frozen=True)
class HubModel(SingleModel):
    """One that transformers computes."""

    context: int

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


def find_hub_model(folder: Path, device: torch.device) -> HubModel:
    """Describe the model in a folder without loading its weights. Raises PierError."""
    transformers = _library(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise _unreadable(folder, error) from error
    text = config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    context = getattr(text, "max_position_embeddings", None) or UNBOUNDED
    return HubModel(folder.resolve().name, folder, device, text.vocab_size, size, 2.0 * parameters, context)


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

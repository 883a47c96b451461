"""The resumable state of an expert's training: weights, AdamW's moments and the step, which is also the data cursor.

Nothing else affects how training continues: there is no dropout, and the seed and the text decide which rows a step
sees. So training continues to the same bits on any site.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from safetensors import SafetensorError, safe_open

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.base.toml import Section
from pier_node.experts.card import Digest
from pier_node.experts.config import MOST_DOMAINS
from pier_node.rounds.state_store import load_tensors, save_tensors

FILE = "checkpoint.safetensors"
TENSORS = ("weights", "adam_m", "adam_v")
HEADER = 4096
"""Maximum size of a file apart from its tensors, in bytes."""
SOME = 1 << 22
"""Numbers that are checked in one chunk."""
SLOWEST = 128 << 10
"""Bytes per second; a site that sends more slowly cannot deliver a checkpoint."""

log = logging.getLogger(__name__)


class Kept(Section):
    """A checkpoint that the coordinator keeps or should keep: after `step` steps of a job, `size` bytes long.

    Attributes:
        digest: SHA-256 of the file, hex.
    """

    job: Annotated[int, Field(ge=0, lt=MOST_DOMAINS)]
    step: Annotated[int, Field(ge=1, le=1_000_000_000)]
    size: Annotated[int, Field(ge=1, le=1 << 50)]
    digest: Digest

    @property
    def deadline(self) -> float:
        """Seconds that its transfer may take."""
        return 60.0 + self.size / SLOWEST


@dataclass(frozen=True)
class ResumeState:
    """The state after `step` steps and `tokens` tokens; the vectors are fp32 [parameters]."""

    step: int
    tokens: int
    weights: Vector
    adam_m: Vector
    adam_v: Vector

    def save(self, folder: Path, name: str) -> None:
        """Replace the last checkpoint, completely or not at all. Raises OSError."""
        temporary = folder / f"{FILE}.tmp"
        vectors = {key: getattr(self, key) for key in TENSORS}
        save_tensors(temporary, vectors, {"name": name, "step": str(self.step), "tokens": str(self.tokens)})
        durable.put(temporary, folder / FILE)

    @classmethod
    def load(cls, folder: Path, name: str, length: int) -> ResumeState | None:
        """The last checkpoint of the expert with that name; None, with a warning if there is an unusable one."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            vectors, known = load_tensors(path)
            if known["name"] != name or any(len(vectors[key].array) != length for key in TENSORS):
                raise ValueError("it is of another expert")
            return cls(int(known["step"]), int(known["tokens"]), *(vectors[key].array for key in TENSORS))
        except (PierError, durable.Torn, KeyError, ValueError) as error:
            log.warning("%s cannot be used, this expert begins again: %s", path, error)
            return None


def most_bytes(length: int) -> int:
    """Maximum size of a checkpoint of a model with that many parameters, in bytes."""
    return 4 * len(TENSORS) * length + HEADER


def check(path: Path, length: int, step: int, name: str = "") -> None:
    """Check that a received file is a checkpoint after that step, without reading it all at once.

    Args:
        length: number of parameters of the model.
        name: of the expert; "": not known.

    Raises:
        ValueError: the reason why it is not.
        OSError: it cannot be read.
    """
    if path.stat().st_size > most_bytes(length):
        raise ValueError(f"more than {most_bytes(length)} bytes")
    try:
        with safe_open(path, framework="numpy") as file:
            known = file.metadata() or {}
            if sorted(file.keys()) != sorted(TENSORS):
                raise ValueError(f"it has {sorted(file.keys())}, not {', '.join(TENSORS)}")
            for key in TENSORS:
                _check_tensor(key, file.get_slice(key), length)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if known.get("step") != str(step) or not re.fullmatch("[1-9][0-9]{0,17}", known.get("tokens", "")):
        raise ValueError(f"it is not one after step {step}")
    if name and known.get("name") != name:
        raise ValueError("it is of another expert")


def _check_tensor(key: str, tensor: Any, length: int) -> None:
    if tensor.get_dtype() != "F32" or tensor.get_shape() != [length]:
        raise ValueError(f"{key} is {tensor.get_dtype()} {tensor.get_shape()}, not F32 [{length}]")
    for start in range(0, length, SOME):
        some = tensor[start : min(start + SOME, length)]
        if not np.isfinite(some).all() or (key == "adam_v" and (some < 0).any()):
            raise ValueError(f"{key} has values that no training gives")

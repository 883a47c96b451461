"""Score sheets and scoring orders: what one expert gave the rows of a domain, and which sheets a site should make.

A site scores its expert locally and sends the sheet: four bytes per byte of scored text, whatever the size of the
model. A sheet identifies rows by hashes and never contains their text. It is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError
from safetensors.numpy import load, save

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.toml import Section, first_problem
from pier_node.experts.card import Hash
from pier_node.experts.config import MOST_DOMAINS, DomainSection, Name
from pier_node.trainer.data.sources import Split

SCORED: tuple[Split, ...] = ("prior", "test")
"""The splits of each domain that are scored."""
MOST_SCORED = 2 * MOST_DOMAINS
"""Maximum number of domains in an order: those with an expert, and as many without."""


class ScoredDomain(Section):
    """A domain to score. `digest` is that of the text for which the plan was made; "": any."""

    section: DomainSection
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


class ScoringOrder(Section):
    """What to score.

    Attributes:
        experts: their names, as on their cards.
        rows: maximum number per domain and split; 0: all.
    """

    id: Hash
    experts: Annotated[tuple[Hash, ...], Field(max_length=MOST_DOMAINS)]
    domains: Annotated[tuple[ScoredDomain, ...], Field(min_length=1, max_length=MOST_SCORED)]
    rows: Annotated[int, Field(ge=0, lt=2**31)] = 0


ENDING = ".scores.safetensors"
MOST_BYTES = 256 << 20
HASH = 16
"""Bytes of a row's hash."""
SCORE_AGAIN = "Score the expert again: pier-node score"

Rows = npt.NDArray[np.uint8]
"""[rows, context + 1] bytes, as experts/domains.py cuts them."""
LogProbs = npt.NDArray[np.float32]
"""[rows, context]: log p of all bytes of a row except its first."""
Hashes = npt.NDArray[np.uint8]
"""[rows, HASH]."""
Parent = npt.NDArray[np.float32]
"""[rows]: log p of all bytes of a row except its first, from the expert's parent."""


class Subject(Section):
    """What a sheet is about.

    Attributes:
        expert: domain of the scored expert.
        weights: SHA-256 of its model.safetensors, hex.
        domain, split: the text.
    """

    expert: Name
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    domain: Name
    split: Split


@dataclass(frozen=True)
class Sheet:
    """Log-probabilities and the hashes of their rows; `parent` if it was available and is not the scored model."""

    subject: Subject
    log_probs: LogProbs
    rows: Hashes
    parent: Parent | None = None

    def save(self, folder: Path) -> Path:
        """Write the sheet; its file name says what it is about. Raises OSError."""
        about = self.subject
        path = folder / f"{about.expert}.{about.weights[:12]}.{about.domain}.{about.split}{ENDING}"
        durable.replace(path, self.packed())
        return path

    def packed(self) -> bytes:
        """The sheet in the form in which it is written and sent."""
        tensors: dict[str, npt.NDArray[Any]] = {"log_probs": self.log_probs, "rows": self.rows}
        if self.parent is not None:
            tensors["parent"] = self.parent
        return save(tensors, {"subject": self.subject.model_dump_json()})


def row_hashes(rows: Rows) -> Hashes:
    """A hash of each row."""
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=HASH).digest() for row in rows)
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, HASH)


def load_sheet(path: Path) -> Sheet:
    """Read a received sheet. Raises PierError: it is not a sheet, or contains impossible values."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PierError(f"{path}: more than {MOST_BYTES} bytes", "Score fewer rows.")
        return unpacked(path.read_bytes())
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", SCORE_AGAIN) from error
    except ValueError as error:
        raise PierError(f"{path}: not a score sheet: {error}", SCORE_AGAIN) from error


def unpacked(packed: bytes) -> Sheet:
    """Parse a sheet. Raises ValueError with the reason why it is not valid."""
    if len(packed) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    subject = _subject(packed)
    try:
        tensors = load(packed)
    except Exception as error:  # the library has no narrower exception that covers all cases
        raise ValueError(str(error)) from error
    parent = tensors.pop("parent", None)
    if set(tensors) != {"log_probs", "rows"}:
        raise ValueError(f"it has {sorted(tensors)}, not log_probs and rows")
    _check(tensors["log_probs"], tensors["rows"], parent)
    return Sheet(subject, tensors["log_probs"], tensors["rows"], parent)


def _subject(packed: bytes) -> Subject:
    """The subject in the header. A safetensors file begins with eight bytes of length, little-endian, and JSON."""
    length = int.from_bytes(packed[:8], "little")
    try:
        header = json.loads(packed[8 : 8 + length])
        return Subject.model_validate_json(header["__metadata__"]["subject"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it does not say what it is about") from error
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error


def _check(log_probs: npt.NDArray[Any], rows: npt.NDArray[Any], parent: npt.NDArray[Any] | None) -> None:
    if log_probs.dtype != np.float32 or log_probs.ndim != 2 or not log_probs.size:
        raise ValueError(f"log_probs are {log_probs.dtype} {[*log_probs.shape]}, not float32 [rows, tokens]")
    if rows.dtype != np.uint8 or rows.shape != (len(log_probs), HASH):
        raise ValueError(f"rows are {rows.dtype} {[*rows.shape]}, not uint8 [{len(log_probs)}, {HASH}]")
    if parent is not None and (parent.dtype != np.float32 or parent.shape != (len(rows),)):
        raise ValueError(f"parent is {parent.dtype} {[*parent.shape]}, not float32 [{len(rows)}]")
    if any(not np.isfinite(each).all() or (each > 0).any() for each in (log_probs, parent) if each is not None):
        raise ValueError("a log-probability is above 0 or no number")

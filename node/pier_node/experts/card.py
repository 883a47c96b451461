"""Experts on disk: the card of each expert, and the ensemble to which several belong.

A card, `expert.json` next to an exported model, says what an expert is, how it was made and how good it is. Its name is
a hash of everything that decides its weights, so two plans never write to the same path. In HDEE's reference code, one
expert overwrote another. An ensemble is a folder whose `ensemble.json` names the expert of each domain and its
subfolder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.toml import Section, first_problem
from pier_node.experts.config import MOST_DOMAINS, Name

CARD_FILE, WEIGHTS_FILE = "expert.json", "model.safetensors"
MOST_BYTES_OF_CARD = 1 << 16
"""Maximum size of a card, in bytes."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
"""Model files that could run arbitrary code when loaded."""
TRAIN_AGAIN = "Collect the expert again from the site that trained it."

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Literal["S", "M", "L"]
Finite = Annotated[float, Field(ge=0, le=1e300, allow_inf_nan=False)]


class Card(Section):
    """The description of an expert. Losses are on the dev split of its own domain, in bits per byte.

    Attributes:
        name: see `artefact_name`.
        domain_hash: hash of the text (experts/domains.py).
        parent: what it branched from: another expert's name, or the digest of the run's state, hex.
        steps, tokens, flops, epochs: as executed; FLOPs as trainer/model/cost.py counts them.
        seed: decides the order of its rows and how it was widened.
        recipe: hash of the settings of its model and training; "": not known.
        digest: SHA-256 of model.safetensors, hex.
        standard_error: of parent_loss - loss, by a bootstrap over the rows.
        accepted: it is better than its parent by more than two standard errors; otherwise the parent stands in for it.
    """

    name: Hash
    domain: Name
    domain_hash: Hash
    parent: Annotated[str, Field(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})$")]
    size: Size
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    recipe: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    tokens: Annotated[int, Field(ge=1, le=2**63)]
    flops: Finite
    epochs: Finite
    digest: Digest
    loss: Finite
    parent_loss: Finite
    standard_error: Finite
    accepted: bool

    def save(self, folder: Path) -> None:
        """Write the card into the folder of its model. Raises OSError."""
        durable.replace(folder / CARD_FILE, f"{self.model_dump_json(indent=1)}\n".encode())


def artefact_name(parent: str, domain_hash: str, size: str, steps: int, seed: int, recipe: str = "") -> str:
    """The name of an expert, 32 hex digits. Different weights have different names."""
    terms = repr((parent, domain_hash, size, steps, seed, *filter(None, [recipe])))
    return hashlib.blake2b(terms.encode(), digest_size=16).hexdigest()


def digest_of(folder: Path) -> str:
    """SHA-256 of a folder's weights, hex. Raises OSError."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_card(folder: Path) -> Card:
    """Load the card of the expert in a folder, and check the weights against it.

    Raises:
        PierError: there is no card, it is not valid, the weights differ, or there are pickle files next to it.
    """
    path = folder / CARD_FILE
    refuse_pickles(folder)
    try:
        with path.open("rb") as file:
            card = Card.model_validate_json(file.read(MOST_BYTES_OF_CARD))
        digest = digest_of(folder)
    except OSError as error:
        raise PierError(f"{error.filename}: {error.strerror}", TRAIN_AGAIN) from error
    except ValidationError as error:
        raise PierError(f"{path}: not a card: {first_problem(error)}", TRAIN_AGAIN) from error
    if card.name != artefact_name(card.parent, card.domain_hash, card.size, card.steps, card.seed, card.recipe):
        raise PierError(
            f"{path}: the name is not that of its parent, domain, size, steps, seed and recipe", TRAIN_AGAIN
        )
    if card.digest != digest:
        raise PierError(f"{folder / WEIGHTS_FILE}: these are not the weights that {CARD_FILE} names", TRAIN_AGAIN)
    return card


def refuse_pickles(folder: Path) -> None:
    """Raise PierError if a model folder contains files that only unpickling could read."""
    for pattern in PICKLES:
        for found in folder.glob(pattern):
            raise PierError(f"{found}: a pickle can run code, and is not read", "Remove it: weights are safetensors.")


ENSEMBLE_FILE = "ensemble.json"
MOST_BYTES_OF_ENSEMBLE = 1 << 20
COLLECT = "Collect the experts again: pier-coordinator experts collect"


class Member(Section):
    """One expert of the ensemble.

    Attributes:
        domain: the domain of the expert.
        folder: folder of an exported model, relative to the ensemble's folder and inside it.
        stands_in: it is the parent of an expert that was refused. It has a card only if it is itself an expert.
    """

    domain: Name
    folder: Annotated[str, Field(min_length=1, max_length=255)]
    stands_in: bool = False

    @field_validator("folder")
    @classmethod
    def check_inside(cls, folder: str) -> str:
        """Refuse a path that leads out of the folder."""
        path = PurePosixPath(folder)
        if path.is_absolute() or ".." in path.parts or "\\" in folder or "\0" in folder:
            raise ValueError(f"{folder!r} is not a folder inside the ensemble's")
        return folder


class Ensemble(Section):
    """All members, one per domain, in the order of the plan."""

    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MOST_DOMAINS)]

    @model_validator(mode="after")
    def check_domains(self) -> Self:
        """No domain may have two experts."""
        names = [member.domain for member in self.members]
        if len({*names}) < len(names):
            raise ValueError("a domain has two experts")
        return self

    def save(self, folder: Path) -> None:
        """Write ensemble.json. Raises OSError."""
        durable.replace(folder / ENSEMBLE_FILE, f"{self.model_dump_json(indent=1)}\n".encode())


def load_ensemble(folder: Path) -> Ensemble:
    """The ensemble in a folder. Each member has a model there, which is not read yet (`load_card` checks one).

    Raises:
        PierError: there is none, it is not valid, or a member's folder is missing or holds no model.
    """
    path = folder / ENSEMBLE_FILE
    try:
        with path.open("rb") as file:
            ensemble = Ensemble.model_validate_json(file.read(MOST_BYTES_OF_ENSEMBLE))
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", COLLECT) from error
    except ValidationError as error:
        raise PierError(f"{path}: not an ensemble: {first_problem(error, 'members')}", COLLECT) from error
    for member in ensemble.members:
        inside = (folder / member.folder).resolve()
        if not inside.is_relative_to(folder.resolve()):
            raise PierError(f"{path}: {member.folder} leads out of the folder", COLLECT)
        refuse_pickles(inside)
        if not (inside / WEIGHTS_FILE).is_file():
            raise PierError(f"{inside}: there is no {WEIGHTS_FILE}, the expert of {member.domain}", COLLECT)
    return ensemble

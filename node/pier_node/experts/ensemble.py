"""An ensemble on disk: `ensemble.json` in a folder names the expert of each domain and its subfolder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.toml import first_problem
from pier_node.experts.card import WEIGHTS_FILE, refuse_pickles
from pier_node.experts.config import MOST_DOMAINS, Name

ENSEMBLE_FILE = "ensemble.json"
MOST_BYTES = 1 << 20
COLLECT = "Collect the experts again: pier-coordinator experts collect"


class Member(BaseModel):
    """One expert of the ensemble.

    Attributes:
        domain: the domain of the expert.
        folder: folder of an exported model, relative to the ensemble's folder and inside it.
        stands_in: it is the parent of an expert that was refused. It has a card only if it is itself an expert.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class Ensemble(BaseModel):
    """All members, one per domain, in the order of the plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
            ensemble = Ensemble.model_validate_json(file.read(MOST_BYTES))
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

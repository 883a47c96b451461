"""TOML files that people write, loaded as pydantic models, with errors that name each wrong key.

Section is the base of every table of a configuration file. `explain` and `first_problem` say in words what is wrong
with a key, of run.toml or experts.toml or of what another program made.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pier_node.base.errors import PierError

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A table: unknown keys and numbers that are not finite are errors, and values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def explain(problem: Any, model: type[BaseModel]) -> str:
    """What is wrong with a key, its value, and what is allowed: an error of pydantic about the model of a file."""
    key, message = ".".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if not key:  # what does not fit together: the message names the keys
        return str(message)
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such key; {_allowed(problem['loc'], model)}"
    value = problem["input"]
    shown = "" if isinstance(value, dict) else f" = {json.dumps(value, default=str)}"
    return f"{key}{shown}: {message}"


def first_problem(error: ValidationError, whole: str = "") -> str:
    """The first error in what a program wrote or sent: key and reason; `whole` stands for the key if there is none."""
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or whole}: {found['msg']}"


def _allowed(location: tuple[str | int, ...], kind: type[BaseModel]) -> str:
    for part in location[:-1]:
        if isinstance(part, str):
            inside = kind.model_fields[part].annotation
            inside = get_args(inside)[0] if get_origin(inside) in (tuple, UnionType) else inside
            assert isinstance(inside, type)
            assert issubclass(inside, BaseModel)
            kind = inside
    return f"allowed here: {', '.join(kind.model_fields)}"


M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path, made_by: str) -> dict[str, Any]:
    """The tables of a file; `made_by` is the command that writes one. Raises PierError if it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", f"Write one with: {made_by}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PierError(f"{path}: not TOML: {error}", f"Compare it with what `{made_by}` writes.") from error


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a file for people to edit. Raises PierError if it exists (without `force`) or cannot be written."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PierError(f"{path} exists", "Give another file name, or --force to write over it.") from error
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", "Give a file in a folder that can be written.") from error


def validated(tables: Any, model: type[M], where: str) -> M:
    """The tables as a model. Raises PierError, which names each key whose value is not allowed."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        lines = [explain(problem, model) for problem in error.errors()]
        raise PierError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines)) from error

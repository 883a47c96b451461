"""A TOML file that people write, as a pydantic model; what is wrong with it is said key by key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pier_node.config_errors import explain
from pier_node.errors import PierError

M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path, made_by: str) -> dict[str, Any]:
    """The tables of a file; `made_by` is the command that writes one. Raises PierError: it is missing, or no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", f"Write one with: {made_by}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PierError(f"{path}: not TOML: {error}", f"Compare it with what `{made_by}` writes.") from error


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a file for people to change. Raises PierError: it exists (without `force`), or cannot be."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PierError(f"{path} exists", "Give another file name, or --force to write over it.") from error
    except OSError as error:
        raise PierError(f"{path}: {error.strerror}", "Give a file in a folder that can be written.") from error


def validated(tables: Any, model: type[M], where: str) -> M:
    """The tables as a model. Raises PierError, which names each key that has a value that is not allowed."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        lines = [explain(problem, model) for problem in error.errors()]
        raise PierError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines)) from error

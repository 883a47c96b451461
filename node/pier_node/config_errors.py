"""A key that is not as it must be, in words: of run.toml or experts.toml, or of what another program made."""

from __future__ import annotations

import json
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError


def explain(problem: Any, model: type[BaseModel]) -> str:
    """What is wrong with a key, its value, and what is allowed.

    Args:
        problem: as pydantic tells it.
        model: the whole file's.
    """
    key = ".".join(str(part) for part in problem["loc"]) or "(top level)"
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such key; {_allowed(problem['loc'], model)}"
    value = problem["input"]
    shown = "" if isinstance(value, dict) else f" = {json.dumps(value, default=str)}"
    return f"{key}{shown}: {problem['msg'].removeprefix('Value error, ')}"


def first_problem(error: ValidationError, whole: str = "") -> str:
    """The first thing that is wrong with what a program wrote, or sent: key and reason; `whole`: if no key is."""
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or whole}: {found['msg']}"


def _allowed(location: tuple[str | int, ...], kind: type[BaseModel]) -> str:
    for part in location[:-1]:
        if isinstance(part, str):
            inside = kind.model_fields[part].annotation
            inside = get_args(inside)[0] if get_origin(inside) is tuple else inside
            assert isinstance(inside, type)
            assert issubclass(inside, BaseModel)
            kind = inside
    return f"allowed here: {', '.join(kind.model_fields)}"

"""A key of run.toml that is not as it must be, in words."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel


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


def _allowed(location: tuple[str | int, ...], kind: type[BaseModel]) -> str:
    for part in location[:-1]:
        inside = kind.model_fields[str(part)].annotation
        assert isinstance(inside, type)
        assert issubclass(inside, BaseModel)
        kind = inside
    return f"allowed here: {', '.join(kind.model_fields)}"

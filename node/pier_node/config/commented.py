"""The text of a TOML file that shows every key of a configuration: its meaning, what is allowed, and its value.

Sections, keys, defaults and bounds come from pydantic models, and meanings from their docstrings. `run_toml` writes
such a file for RunConfig, from the models of run.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pier_node.base.toml import Section
from pier_node.config.presets import PRESETS
from pier_node.config.run import RunConfig

WIDTH = 100


@dataclass(frozen=True)
class Notes:
    """What the models do not say.

    Attributes:
        meanings: of keys in place of their docstrings, by "section.key".
        reasons: for the values of keys, after their meanings, by "section.key".
        decides: by section, the keys that other keys' defaults follow from, and their possible values.
    """

    meanings: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    decides: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)


def commented(config: BaseModel, notes: Notes) -> Iterator[str]:
    """The lines of a file; a key that follows from another key of its section is in a line that begins with #."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _section(name, value, notes)
        elif value is not None:  # no table: Pier fills it in when there is something to say
            yield from _list(name, value, notes)


def _list(name: str, sections: Sequence[BaseModel], notes: Notes) -> Iterator[str]:
    """[[name]] for each section; only the first one is explained."""
    for number, section in enumerate(sections):
        if number == 0:
            yield from _section(name, section, notes, "[[{}]]")
        else:
            given = section.model_dump(exclude_defaults=True)
            yield from (f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in given.items()), "")


def _section(name: str, section: BaseModel, notes: Notes, title: str = "[{}]") -> Iterator[str]:
    follows = _following(name, section, notes)
    docstrings = _docstrings(type(section))
    yield from (f"# {inspect.getdoc(type(section))}", title.format(name))
    inside = {key: part for key in type(section).model_fields if isinstance(part := getattr(section, key), BaseModel)}
    for key, info in type(section).model_fields.items():
        if key in inside or getattr(section, key) is None:
            continue
        meaning = notes.meanings.get(f"{name}.{key}") or docstrings.get(key, "")
        meaning = f"{meaning} {notes.reasons.get(f'{name}.{key}', '')}"
        allowed = "one of " + ", ".join(PRESETS) if key == "preset" else _allowed(info)
        about = " ".join([*meaning.split(), *([f"[{allowed}]"] if allowed else [])])
        yield from textwrap.wrap(about, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
        value = getattr(section, key)
        absent = key in follows or value == ()  # tables of a list cannot be added to one that is there
        yield f"{'#' if absent else ''}{key} = {_toml(value)}"
    yield ""
    for key, part in inside.items():
        yield from _section(f"{name}.{key}", part, notes)


def _following(name: str, given: BaseModel, notes: Notes) -> set[str]:
    """Keys whose default depends on the preset, or on the algorithm, and that have this default."""
    if name not in notes.decides:
        return set()
    section, decides = type(given), notes.decides[name]
    plain = section.model_validate({decider: getattr(given, decider) for decider in decides})
    variants = [section.model_validate({decider: value}) for decider, values in decides.items() for value in values]
    keys = [key for key in section.model_fields if key not in decides and getattr(given, key) == getattr(plain, key)]
    return {key for key in keys if len({getattr(variant, key) for variant in variants}) > 1}


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The string after each field, as documentation tools read it."""
    kinds = [kind for kind in section.__mro__ if kind not in (*Section.__mro__, *BaseModel.__mro__)]
    definitions = [ast.parse(inspect.getsource(kind)).body[0] for kind in kinds]
    return {
        field.target.id: str(text.value.value)
        for definition in definitions
        if isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _allowed(info: FieldInfo) -> str:
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(str(it) if isinstance(it, str) else _toml(it) for it in get_args(info.annotation))
    if info.annotation is bool:
        return "true or false"
    words = {"ge": "{} or more", "gt": "above {}", "lt": "below {}", "le": "{} or less", "pattern": "must match {}"}
    bounds = [(word, getattr(rule, kind, None)) for rule in info.metadata for kind, word in words.items()]
    return ", ".join(word.format(bound) for word, bound in bounds if bound is not None)


def _toml(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


HEAD = """\
# The configuration of a Pier run. All sites share it, and it never changes once the run has begun.
# Settings of a single site (addresses, devices, its --dataset) are options of `pier-node start`.
# Every key has a default and may be left out. A line `#key = …` shows a default that depends on another key
# of its section. Remove the # to change it.
"""

DECIDES: dict[str, dict[str, Sequence[str]]] = {
    "model": {"preset": tuple(PRESETS)},
    "outer": {"algorithm": ("pier", "diloco", "noloco", "sync"), "codec": ("none", "topk")},
}
"""By section, the keys that other keys' defaults follow from, and their possible values."""


def run_toml(given: Mapping[str, Any] | None = None, why: str = "") -> str:
    """The text of run.toml; keys that follow from the preset, algorithm or codec are in lines that begin with #.

    Args:
        given: tables with keys that are not to have their defaults.
        why: the reason for outer.algorithm.
    """
    notes = Notes(reasons={"outer.algorithm": why}, decides=DECIDES)
    return "\n".join([HEAD, *commented(RunConfig.model_validate(given or {}), notes)])

"""[program] of run.toml: a run whose model and training loop are its users' own, reached through `import pier`.

The section takes the place of [model], [data] and the optimizer in [inner]. It names every trained parameter with its
shape, in order, so that the hash of the configuration covers the layout and an error can name the first difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field

from pier_node.base.toml import PositiveInt, Section

NAMED = r"^\S{1,256} ([1-9][0-9]{0,14}(x[1-9][0-9]{0,14}){0,7})?$"
_BLANK = re.compile(r"\s")
TENSORS = 4096
"""Most trained parameters (tensors) of a model."""

Shape = tuple[int, ...]


class TensorsSection(Section):
    """A model that the configuration knows by its parameters alone."""

    tensors: Annotated[tuple[Annotated[str, Field(pattern=NAMED)], ...], Field(min_length=1, max_length=TENSORS)]
    """Name and shape of each trained parameter, in order, such as "lm_head.weight 256x128"."""

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every tensor, in order."""
        for text in self.tensors:
            name, _, sizes = text.rpartition(" ")
            yield name, tuple(map(int, sizes.split("x"))) if sizes else ()


class ProgramSection(TensorsSection):
    """[program]: the users' own model and loop (docs/program.md); `pier.join` fills it in."""

    step_tokens: PositiveInt
    """Tokens that a site trains on in one inner step, at most; nobody believes a site that claims more."""


def described(shapes: Iterable[tuple[str, Shape]]) -> tuple[str, ...]:
    """Tensors as [program] lists them."""
    return tuple(f"{_BLANK.sub('_', name)} {'x'.join(map(str, shape))}" for name, shape in shapes)


def first_difference(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """Where two lists of tensors part, in words; "" if they are equal."""
    for index, (mine, run) in enumerate(zip(ours, theirs)):
        if mine != run:
            return f"parameter {index + 1} is {_shown(mine)} here and {_shown(run)} in the run"
    if len(ours) != len(theirs):
        return f"the model here has {len(ours)} trained parameters, that of the run {len(theirs)}"
    return ""


def _shown(tensor: str) -> str:
    name, _, sizes = tensor.rpartition(" ")
    return f"{name} [{sizes.replace('x', ', ')}]"


def outer_of_program(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run.toml, with an [outer] that fits [program]: Pier's starts need a batch of the whole run."""
    outer = tables.get("outer") or {}
    if not tables.get("program") or not isinstance(outer, dict):
        return tables
    return {**tables, "outer": {"start": "none", **outer}}

"""[model.transformers] of run.toml: a model that Pier's own decoder does not know, and that transformers builds.

Every site gets its config.json with the run's configuration, and knows its parameters by name and shape, so that a
daemon needs neither transformers nor the files of the model. What comes from the network is bounded here, and can name
no code: transformers builds the model by its own code alone, from keys that hold nothing but data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from pier_node.base.errors import PierError
from pier_node.config.program import TENSORS, TensorsSection

CONFIG = 16_384
"""Most characters of a config.json."""
NAMES = 65_536
"""Most characters of the names and shapes of all tensors: the trainer gets them in an environment variable."""
DEPTH, LARGEST = 8, 1 << 31
"""How deep the tables of a config.json may be, and how large its numbers."""
REFUSED = (
    *("auto_map", "_auto_class", "custom_pipelines", "quantization_config", "_name_or_path", "name_or_path"),
    *("num_labels", "id2label", "label2id"),
)
"""Keys of code that is not in transformers, of weights that cannot be trained, of a place on one machine, and of
classifiers, whose labels transformers lists; and those with `_implementation` in them, which may name code to fetch."""
COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers", "num_encoder_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
"""Keys of what transformers makes lists and modules of: no more than a run may have tensors."""
LIBRARY = "transformers"
INSTALL = "Install it: pip install transformers, or scripts/install hf in a clone of Pier."


class TransformersSection(TensorsSection):
    """The config.json of the model, and its parameters; `pier-node init --from` fills this in."""

    config: Annotated[str, Field(max_length=CONFIG)]
    """The content of config.json, without keys that concern one machine or name code."""

    @model_validator(mode="after")
    def check_config(self) -> Self:
        """Refuse what is no object of plain data, or would have transformers run or fetch code."""
        if sum(map(len, self.tensors)) > NAMES:
            raise ValueError(f"the names and shapes of the model's tensors have more than {NAMES:,} characters")
        try:
            content = json.loads(self.config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"config is not JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise ValueError('config is no object with a "model_type"')
        if problem := flaw(content):
            raise ValueError(f"config: {problem}")
        return self

    @property
    def content(self) -> dict[str, Any]:
        """The content of config.json."""
        return dict(json.loads(self.config))

    @property
    def kind(self) -> str:
        """The architecture, such as "qwen3"."""
        return str(self.content["model_type"])

    def require_library(self) -> None:
        """Check that transformers is there, without loading it. Raises PierError."""
        if find_spec(LIBRARY) is None:
            raise PierError(f"transformers builds this run's model ({self.kind}), and is not installed here", INSTALL)


def block_of(name: str) -> int | None:
    """The number of the block that a parameter belongs to, in its name; None: it is outside of the blocks."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that a run keeps: all but those that `TransformersSection` refuses."""
    return {
        key: plain(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if not _is_refused(key)
    }


def _is_refused(key: str) -> bool:
    return key in REFUSED or "_implementation" in key


def flaw(content: Mapping[str, Any]) -> str:
    """What a run cannot have of a config.json, in words; "" if there is nothing."""
    return next(_flaws(content), "")


def _flaws(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > DEPTH:
        yield f"tables in more than {DEPTH} others"
    elif isinstance(value, dict):
        for key, inside in value.items():
            if _is_refused(key):
                yield f"{key} is not allowed in a run"
            if key in COUNTS and isinstance(inside, int) and inside > TENSORS:
                yield f"{key} is {inside}; at most {TENSORS} are allowed"
            yield from _flaws(inside, depth + 1)
    elif isinstance(value, list):
        for inside in value:
            yield from _flaws(inside, depth + 1)
    elif isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        yield f"the number {value} is too large"

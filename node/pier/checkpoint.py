"""The newest model of a run, from a site's folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from pier_node.base.errors import PierError
from pier_node.config.program import first_difference
from pier_node.engine.parameters import Vectors
from pier_node.rounds.saved_model import newest_state, site_config


def load(model: nn.Module, folder: str | Path = "pier-data") -> int:
    """Put the newest committed weights in a site's folder into a model; returns their round.

    Args:
        model: as the run trains it; of buffers, and of parameters that require no gradient, it keeps its own.
        folder: of a site of a run of programs, whether or not its daemon runs.

    Raises:
        PierError: there are none, or they are of another model.
    """
    config, vectors = site_config(Path(folder)), Vectors(model, rank=0)
    if config.program is None:
        raise PierError(f"{folder} is of a run of Pier's own decoder", "`pier-node export` writes its model.")
    if difference := first_difference(vectors.tensors, config.program.tensors):
        raise PierError(f"the run in {folder} trains another model: {difference}")
    state = newest_state(Path(folder), config)
    vectors.take(state.anchor)
    return state.round

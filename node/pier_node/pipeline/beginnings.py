"""What the stages of a pipeline begin with: weights from the run's seed, or those of a model that its founder has.

Weights from the seed are made at every site. A model is read once, by the founder, which keeps its stages on its disk,
and gives them to the sites that take them up.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.stage import scatter, stage_layout
from pier_node.rounds.state_store import StateStore
from pier_node.trainer.model.initial import initial_weights

FOLDER = "given"
MOMENTS = (ADAM_M, ADAM_V)


def made(config: RunConfig, stage: int) -> Vector:
    """The initial weights of a stage from the run's seed: those of the whole model, bit for bit."""
    layout = stage_layout(config.model, config.pipeline.stages, stage)
    return initial_weights(config.model, config.run.seed, layout).numpy()


class Beginnings:
    """What stages begin with, as far as the site with this data folder can tell."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._config = folder / FOLDER, config

    def gives(self) -> bool:
        """Whether this site has the weights of all stages of this run, which others lack. Blocks. Raises PierError."""
        return self._config.begins_pretrained and self._store(0).peek() is not None

    def read(self, model: Path) -> None:
        """Read the model in a folder, in Hugging Face's format, and keep its stages. Blocks. Raises PierError.

        The whole model is in host memory meanwhile, and two of the stages.
        """
        from pier_node.trainer.model.hub import import_weights

        config, stages = self._config.model, self._config.pipeline.stages
        for stage in range(stages):  # of an attempt that was interrupted; the first one says that all are there
            shutil.rmtree(self._folder / f"stage-{stage}", ignore_errors=True)
        whole = import_weights(model)[1].numpy()
        for stage in reversed(range(stages)):
            self._store(stage).keep(_version_0(scatter(config, stages, whole, stage), MOMENTUM))

    def given(self, stage: int) -> OuterState | None:
        """What the founder keeps of a stage: weights, and a momentum of 0; None: this is another site. Blocks.

        Its hashes are there, too.
        """
        return self._store(stage).of(0)

    def of(self, stage: int) -> OuterState | None:
        """The state with which a stage begins; None: it is to be fetched from the founder. Blocks. Raises PierError."""
        if not self._config.begins_pretrained:
            return self.with_weights(made(self._config, stage))
        kept = self.given(stage)
        return self.with_weights(kept.anchor) if kept else None

    def with_weights(self, weights: Vector) -> OuterState:
        """The state with which a stage begins that has these weights."""
        momentum = () if self._config.outer.algorithm == "sync" else (MOMENTUM,)
        return _version_0(weights, *momentum, *MOMENTS)

    def _store(self, stage: int) -> StateStore:
        return StateStore(self._folder / f"stage-{stage}", self._config.hash())


def _version_0(weights: Vector, *zeros: str) -> OuterState:
    tensors = {name: SharedVector(len(weights)) for name in (ANCHOR, *zeros)}
    tensors[ANCHOR].array[:] = weights
    return OuterState(0, (), tensors, {})
